// The script of the pages. Live parts arrive over one event stream and are patched in place, so that focus, selection
// and open details stay. Lists of messages are requested again when messages have changed. Keys are handled here. All
// text comes escaped from the server; nothing here makes markup.
"use strict";

(() => {
  const page = document.body.dataset.page;
  if (!page) return; // the login

  document.documentElement.classList.add("has-script");

  // ---- patching ----------------------------------------------------------------------------------------------------

  // Makes `now` equal to `then`, changing only what differs.
  function patch(now, then) {
    for (const { name, value } of [...then.attributes]) {
      // The viewer may have folded it.
      if (name !== "open" && now.getAttribute(name) !== value) now.setAttribute(name, value);
    }
    for (const { name } of [...now.attributes]) {
      // What the viewer opened stays open, and what was chosen by keys stays chosen.
      if (!then.hasAttribute(name) && name !== "open" && name !== "data-chosen") now.removeAttribute(name);
    }
    patchChildren(now, then);
  }

  function patchChildren(now, then) {
    const wanted = [...then.childNodes];
    wanted.forEach((node, index) => {
      const old = now.childNodes[index];
      if (!old) {
        now.append(node.cloneNode(true));
      } else if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) {
        old.replaceWith(node.cloneNode(true));
      } else if (node.nodeType === Node.ELEMENT_NODE) {
        patch(old, node);
      } else if (old.nodeValue !== node.nodeValue) {
        old.nodeValue = node.nodeValue;
      }
    });
    while (now.childNodes.length > wanted.length) now.lastChild.remove();
  }

  // Patches a part of the page. What the viewer has chosen in it stays chosen at the place to which it has moved: a bar with
  // its time, a line with its message.
  function patchPart(part, then) {
    const chosen = part.querySelector("[data-chosen][data-of]");
    const of = chosen?.dataset.of;
    const hasFocus = chosen?.contains(document.activeElement);
    patchChildren(part, then);
    showZone(part);
    if (!chosen || chosen.dataset.of === of) return;
    chosen.removeAttribute("data-chosen");
    const now = part.querySelector(`[data-of="${CSS.escape(of)}"]`);
    now?.setAttribute("data-chosen", "");
    if (!hasFocus) return;
    const link = now?.querySelector("a");
    if (link) link.focus({ preventScroll: true });
    else document.activeElement.blur(); // it would open another message
  }

  const parsed = (markup) => new DOMParser().parseFromString(markup, "text/html");

  // ---- the stream --------------------------------------------------------------------------------------------------

  let held = false;
  let source = null;

  function show(id, markup) {
    if (id === "change") return changed(markup);
    if (id === "problems") return document.title = markup + document.title.replace(/^\(\d+\) /, "");
    const part = document.getElementById(id);
    if (part) patchPart(part, parsed(markup).body);
  }

  function connect() {
    source?.close();
    // A browser has few connections for all pages of a site: a hidden page must not hold one.
    if (document.hidden) return;
    source = new EventSource(`events?page=${encodeURIComponent(page)}`);
    source.onopen = () => say(null);
    source.onmessage = (event) => {
      say(null);
      for (const [id, markup] of held ? [] : Object.entries(JSON.parse(event.data))) show(id, markup);
    };
    source.onerror = () => {
      say("no monitor");
      // A browser reconnects, unless the answer was an error.
      if (source.readyState === EventSource.CLOSED) setTimeout(again, 3000);
    };
  }

  async function again() {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      // The session has ended: the page leads to the login.
      if (answer.redirected) return location.reload();
    } catch {
      // The part is not on the page yet.
    }
    connect();
  }

  // A word in place of the clock, while no part arrives.
  function say(word) {
    const pulse = document.getElementById("pulse");
    if (!pulse) return;
    pulse.dataset.word = word ?? (held ? "paused" : "");
    pulse.classList.toggle("off", Boolean(pulse.dataset.word));
  }

  function hold(on) {
    held = on;
    say(null);
    if (!held) connect(); // a new stream begins with all parts
  }

  // ---- messages ----------------------------------------------------------------------------------------------------

  // Lists of messages are requested again when one has changed its state, and at most this often.
  const REFRESH_MS = 1500;
  const list = document.querySelector("[data-refresh]");
  let latest = document.body.dataset.change;
  let shown = latest;
  let refreshing = false;

  function changed(now) {
    latest = now;
    refresh();
  }

  async function refresh() {
    if (!list || refreshing || held || document.hidden || shown === latest) return;
    // Lines are reused for other messages: the selection must stay with its message.
    if (list.querySelector("input:checked")) return;
    refreshing = true;
    shown = latest;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok) shown = null; // ask again
      const fresh = parsed(await answer.text()).getElementById(list.id);
      if (fresh && !held) patchPart(list, fresh);
    } catch {
      // The stream reports that the monitor is gone.
    }
    setTimeout(() => {
      refreshing = false;
      refresh(); // what has changed since
    }, REFRESH_MS);
  }

  list?.addEventListener("change", (event) => {
    if (event.target.id === "select-all") {
      for (const box of list.querySelectorAll("tbody input[type=checkbox]")) box.checked = event.target.checked;
    }
    const number = list.querySelectorAll("tbody input:checked").length;
    const status = list.querySelector("#selected [role=status]");
    if (status && number) status.textContent = `${number} selected`;
    refresh();
  });

  // The distances of times from now have changed.
  setInterval(() => {
    shown = null;
    refresh();
  }, 60_000);

  document.addEventListener("visibilitychange", () => {
    connect();
    refresh();
  });

  // ---- charts ----------------------------------------------------------------------------------------------------

  // The values of the slot under the mouse, or of the one selected by the arrow keys.
  const readout = document.getElementById("readout");

  function read(slot) {
    if (!readout || !slot) return;
    slot.parentNode.querySelector("g[data-chosen]")?.removeAttribute("data-chosen");
    slot.setAttribute("data-chosen", "");
    readout.textContent = slot.querySelector("title").textContent;
  }

  document.addEventListener("pointerover", (event) => read(event.target.closest?.(".slots g")));
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const plot = event.target.closest?.(".plots");
    if (!step || !plot) return;
    const slots = [...plot.querySelectorAll(".slots g")];
    const at = slots.findIndex((slot) => slot.hasAttribute("data-chosen"));
    read(slots[at < 0 ? slots.length - 1 : Math.min(Math.max(at + step, 0), slots.length - 1)]);
    event.preventDefault();
  });

  // ---- times and copies --------------------------------------------------------------------------------------------

  // The tooltips of times are in UTC, or in the zone of the browser: the viewer's choice stays.
  const zone = document.getElementById("zone");

  function showZone(part) {
    const isLocal = localStorage.getItem("zone") === "local";
    if (zone) zone.textContent = isLocal ? "Times in local time" : "Times in UTC";
    for (const time of part.querySelectorAll("time")) {
      const at = new Date(time.dateTime);
      time.title = isLocal ? at.toLocaleString() : `${at.toISOString().slice(0, 19).replace("T", " ")} UTC`;
    }
  }

  zone?.addEventListener("click", () => {
    localStorage.setItem("zone", localStorage.getItem("zone") === "local" ? "utc" : "local");
    showZone(document);
  });
  showZone(document);

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".copy");
    if (!button) return;
    getSelection().selectAllChildren(button.previousElementSibling);
    // The clipboard of navigator needs TLS, or a loopback address.
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

  // ---- keys --------------------------------------------------------------------------------------------------------

  const lines = () => [...document.querySelectorAll("tr[data-of]")];

  function choose(step) {
    const all = lines();
    if (!all.length) return;
    const at = all.findIndex((line) => line.hasAttribute("data-chosen"));
    all[at]?.removeAttribute("data-chosen");
    const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
    next.setAttribute("data-chosen", "");
    next.querySelector("a")?.focus();
    next.scrollIntoView({ block: "nearest" });
  }

  const help = document.getElementById("help");
  document.getElementById("help-button")?.addEventListener("click", () => help?.showModal());

  document.addEventListener("keydown", (event) => {
    const on = event.target;
    const writes = on instanceof HTMLInputElement || on instanceof HTMLTextAreaElement || on instanceof HTMLSelectElement;
    if (writes || help?.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) {
      link.click();
    } else if (event.key === "/") {
      const search = document.getElementById("q");
      if (search) search.focus();
      else document.querySelector(`nav a[href="messages"]`)?.click();
    } else if (event.key === "j") {
      choose(1);
    } else if (event.key === "k") {
      choose(-1);
    } else if (event.key === " " && !(on instanceof HTMLButtonElement || on instanceof HTMLAnchorElement || on.closest?.("summary"))) {
      hold(!held);
    } else if (event.key === "?") {
      help?.showModal();
    } else {
      return;
    }
    event.preventDefault();
  });

  connect();
})();
