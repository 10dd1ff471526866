"""Uses the Outbox Monitor as a user does, in a real browser. tests/serve.rs calls it on a server that it has prepared: with
messages published, dead, blocked and scheduled; a paused destination; markup in payloads, keys and errors.

Arguments: "scenes", "obstacles" for the server where each message waits for a different reason, "databases" for a monitor
of several, or "pictures" for those of the docs; the URL of the monitor; the words of a psql command that queries its database.
"""

import os
import re
import subprocess
import sys

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

WANTED, URL, PSQL = sys.argv[1], sys.argv[2], sys.argv[3:]
PAGES = ["/", "/messages", "/messages?q=OrderPlaced", "/messages?tab=dead", "/messages?tab=dead&view=each", "/messages?tab=published&q=type:OrderPlaced", "/destinations", "/partitions", "/workers", "/audit"]
IMAGES = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "img")
LONG = 60_000
expect.set_options(timeout=LONG)

# Records violations of the page's security policy, and errors of its script.
WATCH = """
window.faults = [];
document.addEventListener("securitypolicyviolation", (e) => window.faults.push(`policy: ${e.violatedDirective} ${e.blockedURI}`));
window.addEventListener("error", (e) => window.faults.push(`error: ${e.message}`));
window.addEventListener("unhandledrejection", (e) => window.faults.push(`rejection: ${e.reason}`));
"""


def sql(text):
    done = subprocess.run(PSQL + ["-qAtX", "-v", "ON_ERROR_STOP=1", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def new_page(browser, width=1280, height=900, scheme="light"):
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(LONG)
    page.dialogs = []
    page.on("dialog", lambda dialog: (page.dialogs.append(dialog.message), dialog.dismiss()))
    return page


def open_page(page, path):
    page.goto(URL + path)
    # The stream has delivered a live part.
    page.locator("#pulse", has_text="UTC").wait_for()


def wait(page, condition):
    """A condition of Playwright that is text would be evaluated, which the page forbids."""
    for _ in range(300):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("waited in vain")


def no_faults(page, where):
    faults = page.evaluate("window.faults")
    assert faults == [] and page.dialogs == [], f"{where}: {faults} {page.dialogs}"


def pages_fit_and_are_accessible(browser):
    dead = sql("select seq from outbox_dead where destination = 'default' order by seq limit 1")
    fit_and_are_accessible(browser, PAGES + [f"/message/{dead}", "/act/bulk?verb=retry&q="])


def fit_and_are_accessible(browser, paths):
    for width, height, scheme in [(1280, 900, "light"), (1280, 900, "dark"), (360, 740, "dark"), (3840, 2160, "light")]:
        page = new_page(browser, width, height, scheme)
        for path in paths:
            open_page(page, path)
            where = f"{path} at {width} {scheme}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{where}: {wide} px wide"
            cut = page.locator(".top nav a").evaluate_all("(links) => links.filter((a) => a.getBoundingClientRect().right > innerWidth).length")
            assert cut == 0, f"{where}: {cut} links of the navigation are out of sight"
            no_faults(page, where)
            if width != 3840:
                found = Axe().run(page).response["violations"]
                grave = [v for v in found if v["impact"] in ("serious", "critical")]
                details = [(v["id"], v["help"], [n["html"][:200] for n in v["nodes"][:3]]) for v in grave]
                assert not grave, f"{where}: {details}"
        page.context.close()


def lists_are_short(browser):
    page = new_page(browser)
    sql("update outbox_dead set reason = reason || repeat(' and so on', 60)")
    open_page(page, "/messages?tab=dead&view=each")
    rows = page.locator("#list tbody tr")
    tallest = max(rows.evaluate_all("(rows) => rows.map((row) => row.offsetHeight)"))
    assert tallest < 80, f"a row of {tallest} px: its error is longer than one line"
    expect(rows.locator("td.error").first).to_have_attribute("title", re.compile("and so on and so on"))
    italic = page.locator("#q").evaluate("(input) => getComputedStyle(input, '::placeholder').fontStyle")
    assert italic == "italic", "a placeholder looks like a value"
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, "/messages?tab=dead&view=each")
    cut = page.locator(".tabs a").evaluate_all("(links) => links.filter((a) => a.getBoundingClientRect().right > innerWidth).map((a) => a.textContent)")
    assert cut == [], f"tabs out of sight: {cut}"
    open_page(page, "/partitions")
    tall = page.evaluate("document.documentElement.scrollHeight")
    assert tall < 2200, f"partitions: {tall} px tall"
    sql("update outbox_dead set reason = split_part(reason, ' and so on', 1)")
    no_faults(page, "short")
    page.context.close()


def a_message_shows_without_a_reload(browser):
    page = new_page(browser)
    open_page(page, "/")
    page.evaluate("window.mark = 1")
    note = page.locator(".card", has_text="Published a minute").locator(".note")
    before = note.inner_text()
    page.locator("summary:visible", has_text="As a table").click()
    page.locator("details.alerts summary").click()
    sql("select outbox_publish('OrderPlaced', '{}', 'order', 'live', 'placed')")
    expect(note).not_to_have_text(before)
    assert page.evaluate("window.mark") == 1, "the page was reloaded"
    assert page.locator("details[open]:not(.alerts)").count() == 1, "an open part has closed"
    assert page.locator("details.alerts[open]").count() == 0, "a closed part has opened"
    no_faults(page, "overview")

    open_page(page, "/messages?tab=published")
    page.evaluate("window.mark = 2")
    page.keyboard.press("j")
    chosen = page.locator("#list tr[data-chosen] td[data-label=Seq] a")
    before = chosen.inner_text()
    seq = sql("select outbox_publish('OrderPlaced', '{}', 'order', 'live', 'placed')")
    expect(page.locator("#list tbody tr").first.locator("td[data-label=Seq]").first).to_have_text(seq)
    assert page.evaluate("window.mark") == 2, "the page was reloaded"
    expect(chosen).to_have_text(before)
    expect(chosen).to_be_focused()
    page.context.close()


def the_chart_shows_values_by_mouse_and_keyboard(browser):
    page = new_page(browser)
    open_page(page, "/")
    plot = lambda title: page.locator("#chart-1h .plot", has_text=title)
    pending = plot("Pending messages")
    expect(pending.locator(".legend")).to_contain_text("audit 20")
    for above, below in [("Pending messages", "Published a minute"), ("Published a minute", "Failed attempts a minute")]:
        assert plot(above).bounding_box()["y"] < plot(below).bounding_box()["y"], f"{below} is above {above}"
    colour = lambda of: of.locator("li", has_text="default").locator(".swatch").get_attribute("class")
    assert colour(pending) == colour(plot("Published a minute")), "a destination has two colours"
    expect(plot("Failed attempts a minute").locator("path.failed")).to_have_count(1)
    expect(plot("p95 from enqueue to confirm").locator(".scale").first).to_contain_text("s")
    middle, bars = page.locator("#chart-1h .middle").first.bounding_box(), page.locator("#chart-1h .bars").first.bounding_box()
    assert middle["x"] + middle["width"] <= bars["x"], f"a number over the bars: {middle} {bars}"
    readout = page.locator("#readout")
    page.locator("#chart-1h .slots g").last.hover()
    expect(readout).to_contain_text(":")
    page.mouse.move(0, 0)
    page.locator("#chart-1h .plots").focus()
    last = readout.inner_text()
    page.keyboard.press("ArrowLeft")
    expect(readout).not_to_have_text(last)
    page.keyboard.press("ArrowRight")
    for _ in range(30):  # the minute in which the messages were published may be over
        if "default" in readout.inner_text():
            break
        page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("default")
    before = readout.inner_text()
    page.keyboard.press("ArrowLeft")
    expect(readout).not_to_have_text(before)
    page.locator("label", has_text="24 h").click()
    expect(page.locator("#chart-24h")).to_be_visible()
    expect(page.locator("#chart-1h")).to_be_hidden()
    expect(page.locator("#chart-24h .legend").first).to_contain_text("default")
    no_faults(page, "chart")
    page.context.close()


def markup_of_others_stays_text(browser):
    page = new_page(browser)
    seq = sql("select seq from outbox_dead where destination = 'default' order by seq limit 1")
    for path in ["/", "/messages?tab=dead&view=each", f"/message/{seq}", "/partitions"]:
        open_page(page, path)
        assert "<script>window.hacked" in page.locator("main").inner_text(), f"{path} does not show it"
        assert page.evaluate("window.hacked") is None, f"{path} ran it"
        no_faults(page, path)
    page.context.close()


def pages_follow_each_other(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=published")
    seen = set()
    for _ in range(2):
        seqs = page.locator("#list tbody tr td[data-label=Seq]").all_inner_texts()
        assert len(seqs) == 50 and not seen & set(seqs), seqs
        seen |= set(seqs)
        page.locator("a[rel=next]").first.click()
        page.wait_for_load_state()
    expect(page.locator(".pages").first).to_contain_text("101–1")
    page.locator("a[rel=prev]").first.click()
    expect(page.locator(".pages").first).to_contain_text("51–100 and more")
    page.locator("a[rel=prev]").first.click()
    expect(page.locator(".pages").first).to_contain_text("1–50 and more")
    expect(page.locator("a[rel=prev]")).to_have_count(0)
    open_page(page, "/messages")
    page.get_by_label("Search").fill("type:OrderPlaced since:tomorrow")
    page.keyboard.press("Enter")
    expect(page.locator("#list [role=alert]")).to_contain_text("not a time")
    expect(page.get_by_label("Search", exact=True)).to_have_value("type:OrderPlaced since:tomorrow")
    page.context.close()


def a_search_is_made_of_chips_and_an_unknown_name_is_said(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=published&q=type:OrderPlaced")
    chips = page.locator(".chip")
    expect(chips).to_have_text(["type:OrderPlaced×"])
    page.get_by_label("Search", exact=True).fill("key:order:7")
    page.keyboard.press("Enter")
    expect(chips).to_have_text(["type:OrderPlaced×", "key:order:7×"])
    expect(page.locator("#list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="Remove type:OrderPlaced").click()
    expect(chips).to_have_text(["key:order:7×"])
    open_page(page, "/messages?tab=published&q=typ:OrderPlaced")
    expect(page.locator("#list")).to_contain_text("typ: is no criterion")
    no_faults(page, "search")
    page.context.close()


def dead_letters_of_one_cause_are_one_line(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=dead")
    lines = page.locator("#list tbody tr")
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("12 ×")
    assert page.locator("#list table").bounding_box()["y"] < 800 / 3, "the list begins low on the page"
    lines.get_by_role("link", name="Retry group…").click()
    expect(page.locator("h1")).to_have_text("Retry 12 dead letters")
    cause, examples = page.locator("ul.sample").first, page.locator("ul.sample").last
    expect(cause).to_contain_text("12 × unroutable")
    expect(cause).to_contain_text("to default")
    expect(examples.locator("li")).to_have_count(5)
    expect(examples).to_contain_text("OrderLost order:7")
    red = lambda button: button.evaluate("(button) => { const [r, g] = getComputedStyle(button).backgroundColor.match(/\\d+/g); return r > 2 * g; }")
    assert not red(page.get_by_role("button", name="Retry"))
    page.go_back()
    lines.get_by_role("link", name="Discard group…").click()
    assert red(page.get_by_role("button", name="Discard"))
    page.go_back()
    lines.get_by_role("link", name="unroutable").click()
    expect(lines).to_have_count(12)
    open_page(page, "/messages?tab=dead")
    page.get_by_role("link", name="one by one").click()
    expect(lines).to_have_count(12)
    page.set_viewport_size({"width": 1280, "height": 400})
    page.mouse.wheel(0, 600)
    wait(page, lambda: page.evaluate("scrollY") > 300)
    assert page.locator("th", has_text="Seq").bounding_box()["y"] >= 0, "the head is out of sight"
    page.get_by_role("link", name="by cause").first.click()
    expect(lines).to_have_count(1)
    no_faults(page, "causes")
    page.context.close()


def a_message_shows_what_helps_and_its_payload_before_its_transport(browser):
    page = new_page(browser)
    page.context.grant_permissions(["clipboard-read"])
    dead = sql("select seq from outbox_dead where destination = 'default' order by seq limit 1")
    sql(f"""insert into outbox_attempts_log select l.seq, l.destination, l.at + n * interval '1 ms', n, l.outcome, l.error, l.worker_id
            from generate_series(2, 7) n, (select * from outbox_attempts_log where seq = {dead}) l""")
    open_page(page, f"/message/{dead}")
    parts = [page.locator(".obstacle"), page.get_by_role("button", name="Retry now")]
    parts += [page.locator("h2", has_text=title) for title in ["Event", "Attempts", "State", "What is sent"]]
    places = [part.bounding_box()["y"] for part in parts]
    assert places == sorted(places), places
    attempts = page.get_by_role("region", name="Attempts").locator("tbody tr")
    expect(attempts).to_have_count(1)
    expect(attempts.locator("td").first).to_have_text("1–7")
    expect(page.get_by_text("order.lost", exact=True)).to_be_hidden()
    page.locator("summary", has_text="What is sent").click()
    expect(page.get_by_text("order.lost", exact=True)).to_be_visible()
    page.locator(".obstacle .copy").first.click()
    expect(page.locator(".obstacle .copy").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"outboxctl retry {dead} --destination default"
    time = page.locator("time").first
    expect(time).to_have_attribute("title", re.compile("UTC$"))
    page.get_by_role("button", name="Times in UTC").click()
    expect(time).not_to_have_attribute("title", re.compile("UTC$"))
    no_faults(page, "message")
    page.context.close()


def keys_navigate(browser):
    page = new_page(browser)
    open_page(page, "/")
    page.keyboard.press("2")
    page.wait_for_url("**/messages")
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()
    open_page(page, "/messages?tab=dead&view=each")
    page.keyboard.press("j")
    page.keyboard.press("j")
    chosen = page.locator("tr[data-chosen]")
    assert chosen.count() == 1
    seq = chosen.locator("td[data-label=Seq]").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/message/{seq}?**")
    page.keyboard.press("?")
    expect(page.locator("dialog#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog#help")).to_be_hidden()
    open_page(page, "/workers")
    page.locator("h1").click()
    page.keyboard.press("Space")
    expect(page.locator("#pulse")).to_have_attribute("data-word", "paused")
    page.context.close()


def selected_messages_are_changed_and_no_others(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=ready")
    expect(page.locator("nav.tabs", has_text="Dead 12")).to_be_visible(timeout=LONG)
    row = page.locator("tbody tr", has_text="audit is paused").first
    expect(row).to_be_visible()
    expect(page.locator("#selected")).to_be_hidden()
    page.locator("summary", has_text="Filter").click()
    offered = page.locator("#f-destinations option").evaluate_all("(options) => options.map((o) => o.value).sort().join(' ')")
    assert offered == sql("select string_agg(destination, ' ' order by destination) from outbox_destination_status"), offered
    page.get_by_label("Destination").fill("audit")
    page.locator(".fields button").click()
    page.wait_for_url("**destination=audit**")
    seqs = []
    for n in [0, 2]:
        row = page.locator("tbody tr").nth(n)
        seqs.append(row.locator("td a").first.inner_text())
        row.locator("input[type=checkbox]").check()
    # While messages are selected the list does not change.
    sql("select outbox_publish('OrderAudited', '{}', 'order', 'new', 'placed', destination => 'audit')")
    expect(page.locator("#selected")).to_contain_text("2 selected")
    page.locator("#selected button", has_text="Discard").click()
    expect(page.locator("h1")).to_have_text("Discard 2 messages")
    page.get_by_label("Reason, for the audit").fill("placed twice")
    page.get_by_role("button", name="Discard").click()
    expect(page.locator("h1")).to_have_text("2 messages discarded")
    ended = "select string_agg(seq::text, ' ' order by seq) from outbox_history where discarded and destination = 'audit'"
    assert sql(ended) == " ".join(seqs)
    open_page(page, "/messages?tab=discarded")
    page.locator("#select-all").check()
    assert page.locator("tbody input:checked").count() == page.locator("tbody tr").count() >= 2
    no_faults(page, "selected")
    page.context.close()


def the_head_of_the_times_turns_the_order_around(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=dead&view=each")
    head = page.locator("th[aria-sort]")
    expect(head).to_have_attribute("aria-sort", "descending")
    latest = "select seq from outbox_dead order by died_at desc, seq desc, destination desc limit 1"
    earliest = "select seq from outbox_dead order by died_at, seq, destination limit 1"
    first = page.locator("td[data-label=Seq] a").first
    expect(first).to_have_text(sql(latest))
    head.get_by_role("link").click()
    page.wait_for_url("**order=reversed")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(first).to_have_text(sql(earliest))
    head.get_by_role("link").click()
    expect(first).to_have_text(sql(latest))
    open_page(page, "/messages?tab=published&order=reversed")
    expect(page.locator("th[aria-sort]")).to_have_count(0)
    no_faults(page, "order")
    page.context.close()


def two_clicks_find_and_resume_a_paused_destination(browser):
    page = new_page(browser)
    waits = sql("select seq from outbox where destination = 'audit' limit 1")
    open_page(page, f"/message/{waits}?destination=audit")
    expect(page.locator(".obstacle")).to_contain_text("Destination audit is paused")
    expect(page.get_by_role("link", name="Resume audit…")).to_have_class("button primary")
    open_page(page, "/")
    banner = page.locator(".alerts li", has_text="Destination audit is paused")
    problems = page.locator(".alerts li").count()
    assert problems >= 2, "blocked keys have a line, too"
    database = sql("select current_database()")
    expect(page).to_have_title(f"({problems}) {database} · Overview · Outbox Monitor")
    banner.get_by_role("link", name="Resume…").click()
    page.get_by_role("button", name="Resume").click()
    page.wait_for_url("**/destinations")
    assert sql("select count(*) from outbox_paused") == "0"
    expect(page.locator("#alerts")).not_to_contain_text("audit is paused")
    expect(page).to_have_title(f"({problems - 1}) {database} · Destinations · Outbox Monitor")
    expect(page.locator(".tile", has_text="default")).to_contain_text("unroutable")
    no_faults(page, "resume")
    page.context.close()


def many_are_retried_once_the_count_is_typed(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=dead")
    page.get_by_label("Search").fill("type:OrderLost")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=type%3AOrderLost")
    page.get_by_role("link", name="Retry all…").click()
    title = page.locator("h1").inner_text()
    n = int(re.match(r"Retry (\d+) dead letters", title).group(1))
    assert str(n) == sql("select count(*) from outbox_dead d join outbox_events e using (seq) where e.type = 'OrderLost'")
    page.get_by_label("Reason, for the audit").fill("the queue is <b>back</b>")
    # The browser refuses a wrong text by itself. Without that check, the server refuses it.
    page.locator("form.confirm").evaluate("(form) => (form.noValidate = true)")
    page.get_by_label("to confirm").fill(f"retry {n + 1}")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".banner", has_text="Nothing was done")).to_be_visible()
    assert sql("select count(*) from outbox_audit where action = 'retry'") == "0"
    page.get_by_label("Reason, for the audit").fill("the queue is <b>back</b>")
    page.get_by_label("to confirm").fill(f"retry {n}")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1")).to_have_text(f"{n} messages retried")
    assert sql("select count || ' ' || reason from outbox_audit where action = 'retry'") == f"{n} the queue is <b>back</b>"
    open_page(page, "/audit")
    expect(page.locator("tbody tr").first).to_contain_text("the queue is <b>back</b>")
    expect(page.locator("tbody tr").first).to_contain_text("outboxctl serve")
    no_faults(page, "retry")
    page.context.close()


def a_blocked_message_has_the_buttons_of_the_one_that_blocks_it(browser):
    page = new_page(browser)
    held = sql("select seq from outbox_waiting where state = 'g'")
    blocker = sql("select d.seq from outbox_dead d join outbox_waiting w using (key) where w.state = 'g' and d.blocks")
    open_page(page, f"/message/{held}")
    expect(page.locator(".obstacle")).to_contain_text("of its key, which is dead")
    expect(page.get_by_role("button", name=f"Retry {blocker} now")).to_be_visible()
    page.get_by_role("link", name=f"See message {blocker}").click()
    expect(page.locator(".obstacle")).to_contain_text("later messages of its key wait")
    page.go_back()
    page.get_by_role("link", name=f"Discard {blocker}…").click()
    page.get_by_label("Reason, for the audit").fill("withdrawn")
    page.get_by_role("button", name="Discard").click()
    expect(page.locator("h1")).to_contain_text("discarded")
    assert sql(f"select last_error from outbox_history where seq = {blocker} and discarded") == "withdrawn"
    no_faults(page, "discard")
    open_page(page, f"/message/{held}")
    expect(page.locator("h1")).to_contain_text("published")
    page.context.close()


def each_row_has_buttons_of_its_own(browser):
    page = new_page(browser)
    open_page(page, "/messages?tab=scheduled")
    row = page.locator("tbody tr").first
    due = row.locator("td[data-label=Seq] a").inner_text()
    assert sql(f"select due_at > now() from outbox_waiting where seq = {due}") == "t"
    row.get_by_role("link", name="Retry").click()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1")).to_contain_text("published")
    until(page, f"select exists (select from outbox_history where seq = {due} and not discarded)")

    until(page, "select count(*) > 1 from outbox_dead")
    # No message can become a dead letter any more.
    until(page, "select not exists (select from outbox) and not exists (select from outbox_waiting where state = 'b')")
    open_page(page, "/messages?tab=dead&view=each")
    row = page.locator("tbody tr").nth(1)
    dead = row.locator("td[data-label=Seq] a").inner_text()
    others = sql(f"select count(*) from outbox_dead where seq <> {dead}")
    row.get_by_role("link", name="Discard").click()
    page.get_by_label("Reason, for the audit").fill("this one only")
    page.get_by_role("button", name="Discard").click()
    expect(page.locator("h1")).to_contain_text("discarded")
    assert sql("select string_agg(seq::text, ' ') from outbox_history where last_error = 'this one only'") == dead
    assert sql("select count(*) from outbox_dead") == others
    no_faults(page, "rows")
    page.context.close()


def the_list_of_databases_leads_to_their_pages_and_back(browser):
    fit_and_are_accessible(browser, ["/", "/db/postgres/", "/db/shop%2B1/messages"])
    page = new_page(browser)
    open_page(page, "/")
    line = page.locator("tr", has_text="postgres")
    expect(line.locator("[data-label=Dead]")).to_have_text("12")
    expect(line.locator("[data-label=Problems]")).not_to_have_text("0")
    expect(line.locator("[data-label='Last published']")).to_contain_text("ago")
    expect(page.locator("tr", has_text="shop+1").locator("[data-label='Last published']")).to_have_text("–")
    expect(page).to_have_title(re.compile(r"^\(\d+\) Databases · Outbox Monitor$"))
    page.evaluate("window.mark = 1")
    sql("select outbox_publish('OrderLost', '{}', 'order', 'lost in the list', 'lost')")
    expect(line.locator("[data-label=Dead]")).to_have_text("13")
    assert page.evaluate("window.mark") == 1, "the page was reloaded"
    page.keyboard.press("2")
    page.keyboard.press("/")
    page.keyboard.press("j")
    expect(page.locator("tr[data-chosen] a")).to_have_text("postgres")
    page.keyboard.press("Enter")
    page.wait_for_url("**/db/postgres/")
    page.keyboard.press("/")
    page.wait_for_url("**/db/postgres/messages")
    page.get_by_role("link", name="‹ postgres").click()
    page.wait_for_url(URL + "/")
    page.locator("tr", has_text="shop+1").click()
    page.wait_for_url("**/db/shop%2B1/")
    expect(page).to_have_title(re.compile(r"shop\+1 · Overview"))
    no_faults(page, "databases")
    page.context.close()


def click(page, what):
    """Clicks, and counts the click: two must be enough."""
    page.clicks += 1
    what.click()


def overview(browser):
    page = new_page(browser)
    page.clicks = 0
    open_page(page, "/")
    return page


def until(page, condition):
    for _ in range(LONG // 100):
        if sql(condition) == "t":
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never true: {condition}")


def reroute(page, server):
    """Fixes the cause of the failures; a worker reconnects when it sees the option."""
    since = sql(f"select since from outbox_destination_status where destination = '{server}'")
    sql(f"alter server {server} options (set routing_key 'order.placed')")
    until(page, f"select state = 'connected' and since > '{since}' from outbox_destination_status where destination = '{server}'")


def assert_fixed(page, key, clicks=2):
    """All messages of this key are published, in their order, after this number of clicks."""
    assert page.clicks == clicks, f"{page.clicks} clicks"
    wanted = sql(f"select string_agg(seq::text, ' ' order by seq) from outbox_events where aggregate_id = '{key}'")
    assert wanted
    until(page, f"select string_agg(seq::text, ' ' order by published_at, seq) = '{wanted}' from outbox_history where key = 'order:{key}'")
    no_faults(page, key)
    page.context.close()


def four_destinations_are_lines_of_a_table(browser):
    page = new_page(browser)
    open_page(page, "/destinations")
    lines = page.locator("#destinations tbody tr")
    expect(lines).to_have_count(4)
    expect(lines.locator("td:first-child b")).to_have_text(["default", "lost", "shelf", "slow"])
    slow = lines.filter(has_text="slow")
    expect(slow.locator("[data-label='Last error']")).to_contain_text("unroutable")
    expect(slow.get_by_text("Failed attempts")).to_be_hidden()
    slow.locator("summary").click()
    expect(slow.get_by_text("Failed attempts")).to_be_visible()
    expect(lines.filter(has_text="the broker moves").locator("[data-label=Pending]")).to_have_text("1")
    no_faults(page, "destinations")
    page.context.close()


def a_dead_letter_that_blocks_its_key(browser):
    page = overview(browser)
    banner = page.locator(".alerts li", has_text="Key order:dead is blocked")
    expect(banner).to_contain_text("unroutable")
    reroute(page, "shelf")
    click(page, banner.get_by_role("link", name="See message").last)
    expect(page.locator(".obstacle")).to_contain_text("later messages of its key wait for it: unroutable")
    click(page, page.get_by_role("button", name="Retry now"))
    assert_fixed(page, "dead")


def a_message_that_failed_and_waits_for_its_next_attempt(browser):
    page = overview(browser)
    failed = page.locator("ul.errors li", has_text="slow")
    expect(failed).to_contain_text("unroutable")
    expect(page.locator(".card.warn", has_text="Retrying").locator(".value")).to_have_text("1")
    sql("update outbox_waiting set attempts = 3 where destination = 'slow'")
    alert = page.locator(".alerts li", has_text="Retrying")
    expect(alert).to_contain_text("unroutable")
    expect(alert.get_by_role("link", name="See them")).to_have_attribute("href", "messages?tab=retrying")
    tabs = new_page(browser)
    open_page(tabs, "/messages?tab=retrying")
    expect(tabs.locator("nav.tabs .warn")).to_have_text("1")
    tabs.context.close()
    reroute(page, "slow")
    click(page, failed.get_by_role("link", name="message"))
    expect(page.locator(".obstacle")).to_contain_text("the next one is due at")
    click(page, page.get_by_role("button", name="Retry now"))
    assert_fixed(page, "slow")


def a_paused_destination(browser):
    page = overview(browser)
    errors = page.locator("#errors")
    expect(errors.locator("summary")).to_have_text("2 resolved")
    expect(errors.locator("> .errors")).to_contain_text("lost")
    expect(errors.locator("> .errors")).not_to_contain_text("no.queue")
    banner = page.locator(".alerts li", has_text="Destination default is paused")
    expect(banner).to_contain_text("the broker moves")
    click(page, banner.get_by_role("link", name="Resume…"))
    click(page, page.get_by_role("button", name="Resume"))
    assert_fixed(page, "paused")


def a_missing_exchange(browser):
    """The fix is to name an existing exchange. The workers recheck by themselves, so this takes no click."""
    page = overview(browser)
    banner = page.locator(".alerts li", has_text="AMQP broker lost")
    expect(banner).to_contain_text("The exchange does not exist")
    expect(banner).to_contain_text("let the worker declare it: ALTER SERVER lost")
    sql(f"alter server lost options (set exchange '{sql('show outbox.exchange')}')")
    expect(banner).to_have_count(0)
    assert_fixed(page, "lost", clicks=0)


def pictures(browser):
    """Takes pictures for the docs."""
    dead = sql("select seq from outbox_dead order by seq limit 1")
    take_pictures(browser, [
        ("monitor-problems", "/", 1180, 1170, "light"),
        ("monitor-message", f"/message/{dead}", 1180, 1010, "dark"),
        ("monitor-partitions", "/partitions", 1180, 557, "light"),
        ("monitor-list", "/messages?tab=dead&q=type:OrderLost", 1180, 770, "light"),
    ])


def healthy(browser):
    """Takes pictures for the docs, of a system without a problem."""
    take_pictures(browser, [
        ("monitor-overview", "/", 1180, 960, "light"),
        ("monitor-narrow", "/", 360, 1042, "dark"),
    ])


# The address of the broker has a random port.
MASK = """
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const shown = texts.currentNode.data.replace(/127\\.0\\.0\\.1:\\d+/g, "rabbit.example:5672");
  if (shown !== texts.currentNode.data) texts.currentNode.data = shown;
}
"""


def take_pictures(browser, wanted):
    os.makedirs(IMAGES, exist_ok=True)
    for name, path, width, height, scheme in wanted:
        page = new_page(browser, width, height, scheme)
        open_page(page, path)
        page.evaluate(MASK)
        page.screenshot(path=os.path.join(IMAGES, name + ".png"))
        page.context.close()


with sync_playwright() as playwright:
    # As root Chromium has no sandbox; it opens only pages of the test here.
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    scenes = [
        pages_fit_and_are_accessible,
        lists_are_short,
        the_chart_shows_values_by_mouse_and_keyboard,
        markup_of_others_stays_text,
        pages_follow_each_other,
        a_search_is_made_of_chips_and_an_unknown_name_is_said,
        dead_letters_of_one_cause_are_one_line,
        a_message_shows_what_helps_and_its_payload_before_its_transport,
        keys_navigate,
        a_message_shows_without_a_reload,
        selected_messages_are_changed_and_no_others,
        the_head_of_the_times_turns_the_order_around,
        two_clicks_find_and_resume_a_paused_destination,
        a_blocked_message_has_the_buttons_of_the_one_that_blocks_it,
        many_are_retried_once_the_count_is_typed,
        each_row_has_buttons_of_its_own,
    ]
    obstacles = [
        four_destinations_are_lines_of_a_table,
        a_dead_letter_that_blocks_its_key,
        a_message_that_failed_and_waits_for_its_next_attempt,
        a_paused_destination,
        a_missing_exchange,
    ]
    databases = [the_list_of_databases_leads_to_their_pages_and_back]
    for scene in {"pictures": [pictures], "databases": databases, "healthy": [healthy], "scenes": scenes, "obstacles": obstacles}[WANTED]:
        scene(browser)
        print("done:", scene.__name__, flush=True)
    browser.close()
