//! Frames of invented data at four widths, and the effects of keys. `INSTA_UPDATE=always cargo test -p outboxctl`
//! accepts frames that changed: read the diff before you commit it.

use super::fixture::{full_worker_state, opened, outage, psql, snapshot, state, worker, worker_state};
use super::state::{BoardMode, BoardPage, BoardState, Notice, OpenedMessage, Pane};
use super::update::{BoardEvent, BoardRequest, update};
use super::{as_frame, view};
use crate::messages::bulk::Verb;
use crate::operation::OperatorAction;
use crate::progress::{OwnWorker, WorkerFacts};
use crate::queries::model::{Part, Snapshot};
use crate::queries::why::Reason;
use crate::screen::fixture::{self as screen_fixture, HOSTILE, replace_hostile};
use crate::screen::frame::as_text;
use crate::top::lines;
use outbox_core::engine::Sharing;
use proptest::prelude::*;
use ratatui::buffer::Buffer;
use std::time::Duration;

fn press(state: &mut BoardState, keys: &str) -> Option<BoardRequest> {
    screen_fixture::press(keys, |key| update(state, BoardEvent::Key(key)))
}

fn buffer(state: &BoardState, width: u16, height: u16) -> Buffer {
    screen_fixture::buffer(width, height, |frame| view::draw(state, frame))
}

fn frame(state: &BoardState, width: u16, height: u16) -> String {
    as_text(&buffer(state, width, height))
}

// ---- frames ---------------------------------------------------------------------------------------------------------

#[test]
fn a_narrow_terminal_shows_all_panels_in_one_column() {
    insta::assert_snapshot!("60_columns", frame(&state(), 60, 84));
}

#[test]
fn a_small_terminal_shows_the_panel_that_has_the_focus() {
    let mut state = state();
    press(&mut state, "3");
    insta::assert_snapshot!("60_columns_24_lines", frame(&state, 60, 24));
    press(&mut state, "5");
    insta::assert_snapshot!("80_columns_24_lines", frame(&state, 80, 24));
}

#[test]
fn a_terminal_of_middle_width_has_two_columns() {
    insta::assert_snapshot!("100_columns", frame(&state(), 100, 40));
}

#[test]
fn recent_errors_have_their_seq_on_each_terminal_that_is_high_enough() {
    for width in [60, 70, 89, 90, 100, 180] {
        let shown = frame(&state(), width, 40);
        for part in [" Recent errors ", "ago count     seq ", " 5217027 "] {
            assert!(shown.contains(part), "{part}, {width} columns:\n{shown}");
        }
    }
    insta::assert_snapshot!("70_columns", frame(&state(), 70, 40));
}

#[test]
fn a_wide_terminal_gives_its_width_to_errors_and_messages() {
    insta::assert_snapshot!("150_columns", frame(&state(), 150, 40));
    insta::assert_snapshot!("200_columns", frame(&state(), 200, 50));
}

#[test]
fn a_remedy_is_shown_in_full_in_two_lines() {
    let lines: Vec<String> = frame(&state(), 80, 40).lines().map(str::to_owned).collect();
    let first = "  → outbox_retry(seq) or outbox_discard(seq) unblocks the key; with";
    let at = lines
        .iter()
        .position(|line| line.starts_with(first))
        .expect("the remedy");
    assert_eq!(lines[at + 1].trim_end(), "    outbox.on_dead = skip none blocks");
}

#[test]
fn a_very_wide_terminal_cuts_no_name() {
    let shown = frame(&state(), 200, 50);
    assert!(shown.contains("einkauf-größe-ß"), "{shown}");
}

#[test]
fn a_frame_as_text_has_every_row() {
    let text = as_frame(&state(), 100);
    assert!(!text.contains(" more "), "{text}");
    assert!(text.contains("5217333"), "the last message:\n{text}");
}

fn without_hostile_texts(state: &mut BoardState) {
    let plain = |text: &mut String| replace_hostile(text, "HTTP 422: no such index");
    for error in state.shown.errors.as_mut().expect("errors") {
        plain(&mut error.message);
    }
    for message in state.shown.messages.as_mut().expect("messages") {
        message.note.iter_mut().for_each(plain);
    }
}

#[test]
fn the_docs_show_the_current_frame() {
    let docs = include_str!("../../../../docs/top.md");
    // A reader expects other words than a test.
    let mut state = state();
    without_hostile_texts(&mut state);
    let shown = frame(&state, 100, 40);
    assert!(docs.contains(&shown), "docs/top.md is to show this frame:\n{shown}");
}

#[test]
fn a_message_in_full_has_its_event_and_attempts() {
    let mut state = state();
    let asked = press(&mut state, "\n");
    let wanted = BoardRequest::Open {
        seq: 5_210_004,
        destination: "default".into(),
    };
    assert_eq!(asked, Some(wanted));
    assert!(frame(&state, 80, 30).contains("reading …"));
    update(&mut state, BoardEvent::Opened(Box::new(opened())));
    insta::assert_snapshot!("message", frame(&state, 80, 30));
}

#[test]
fn a_message_that_cannot_be_read_says_why() {
    let mut state = state();
    press(&mut state, "\n");
    let opened = OpenedMessage {
        facts: Err("permission \u{1b}[1mdenied".into()),
        ..opened()
    };
    update(&mut state, BoardEvent::Opened(Box::new(opened)));
    let shown = frame(&state, 80, 30);
    assert!(
        shown.contains("not readable") && shown.contains("permission ␛[1mdenied"),
        "{shown}"
    );
}

#[test]
fn help_and_health_are_complete() {
    let mut state = state();
    press(&mut state, "?");
    insta::assert_snapshot!("help", frame(&state, 100, 24));
    press(&mut state, "\u{1b}h");
    insta::assert_snapshot!("health", frame(&state, 100, 16));
}

#[test]
fn each_row_is_shown_in_full() {
    for (pane, wanted) in [
        ("1", "p00"),
        ("2", "audit: connection refused"),
        ("3", "max pending     1,200"),
        (
            "4",
            "no queue is bound to exchange \"events\" for routing key \"order.created\"",
        ),
    ] {
        let mut state = state();
        press(&mut state, pane);
        if pane == "2" {
            press(&mut state, "j");
        }
        assert_eq!(press(&mut state, "\n"), None);
        assert!(matches!(state.mode, BoardMode::Page(BoardPage::Row(_), 0)));
        let shown = frame(&state, 100, 30);
        assert!(shown.contains(wanted), "{wanted}:\n{shown}");
        state.shown = Snapshot {
            partitions: Ok(vec![]),
            workers: Ok(vec![]),
            destinations: Ok(vec![]),
            errors: Ok(vec![]),
            ..snapshot()
        };
        assert!(frame(&state, 100, 30).contains("no longer in the list"));
    }
}

#[test]
fn a_lost_connection_is_a_banner_over_the_last_values() {
    let mut state = state();
    let lost = BoardEvent::Lost("the server went \u{1b}[31maway".into(), Duration::from_secs(2));
    update(&mut state, lost);
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("Connection lost: the server went ␛[31maway. Next try in 2.0 s."),
        "{shown}"
    );
    assert!(shown.contains("5,216,077"), "{shown}");
    update(&mut state, BoardEvent::Snapshot(Box::new(snapshot())));
    assert!(!frame(&state, 100, 40).contains("Connection lost"));
}

#[test]
fn a_part_that_cannot_be_read_says_why_and_leaves_the_others() {
    let why = || "permission denied for view \u{1b}[1moutbox_errors".to_owned();
    let mut state = state();
    let all = state.shown.clone();
    state.shown = Snapshot {
        errors: Err(why()),
        throughput: Err(why()),
        ..all.clone()
    };
    let shown = frame(&state, 100, 40);
    assert!(shown.matches("not readable: permission").count() == 2, "{shown}");
    assert!(shown.contains("1,234"), "{shown}");
    state.shown = Snapshot {
        status: Err(why()),
        partitions: Err(why()),
        workers: Err(why()),
        passes: Err(why()),
        destinations: Err(why()),
        messages: Err(why()),
        problems: Err(why()),
        ..all
    };
    assert!(frame(&state, 200, 60).matches("not readable: permission").count() >= 5);
    assert!(lines::line(&state.shown).contains("status is not readable: permission denied for view ␛[1m"));
}

#[test]
fn no_control_character_of_a_hostile_text_reaches_the_terminal() {
    let mut state = state();
    for (pane, down) in [("4", "j"), ("5", "j")] {
        press(&mut state, pane);
        press(&mut state, down);
        for mode in ["", "\n"] {
            press(&mut state, mode);
            screen_fixture::assert_harmless(|frame| view::draw(&state, frame));
        }
        press(&mut state, "\u{1b}");
    }
    let mut worker = full_worker_state();
    for keys in ["6G", "\n", "\u{1b}7g", "\n"] {
        press(&mut worker, keys);
        screen_fixture::assert_harmless(|frame| view::draw(&worker, frame));
    }
    state.shown.problems.as_mut().expect("problems")[0].problem = HOSTILE.into();
    assert!(!lines::line(&state.shown).contains(char::is_control));
}

#[test]
fn without_colours_no_cell_has_one_and_the_text_is_the_same() {
    let mut plain = state();
    plain.has_colour = false;
    screen_fixture::assert_same_without_colours(|frame| view::draw(&state(), frame), |frame| view::draw(&plain, frame));
}

#[test]
fn without_a_terminal_a_line_has_the_same_values() {
    assert_eq!(
        lines::line(&snapshot()).split("; ").collect::<Vec<_>>(),
        [
            "16:40:05 pending 1234, in flight 48, dead 2, published 5216077, published/s 112.4, failed/s 0.3, oldest 93 s, workers 2/3, partitions 15/16",
            "broker (audit): the receiver cannot be reached: connection refused",
            "keys: 1 key(s) are blocked by a dead letter, for example: order:42 (seq 4711)",
        ]
    );
}

// ---- keys -----------------------------------------------------------------------------------------------------------

#[test]
fn y_copies_the_command_of_the_selected_alert_and_shows_it() {
    let command = "ALTER SERVER audit OPTIONS (SET url :'url')";
    let mut state = state();
    let copied = Some(BoardRequest::Copy(command.into()));
    assert_eq!(press(&mut state, "3y"), copied, "of the first alert");
    assert!(frame(&state, 80, 24).contains(&format!("Copied: {command}")));
    assert_eq!(press(&mut state, "hy"), copied);
    assert!(
        matches!(state.mode, BoardMode::Page(BoardPage::Health, 0)),
        "the page stays"
    );

    let problems = state.shown.problems.as_mut().expect("problems");
    let (retry, discard) = (
        format!("select outbox_retry(4711, 'x{HOSTILE}')"),
        "select outbox_discard(4711)",
    );
    problems[1].remedy = format!("{HOSTILE}: {retry}, or {discard}");
    problems[1].commands = [&*retry, discard].map(psql).into();
    let Some(BoardRequest::Copy(second)) = press(&mut state, "jy") else {
        panic!("no copy of the second alert");
    };
    assert!(second.starts_with("select outbox_retry(4711, 'xbad␛[2J"), "{second}");
    assert!(
        !second.contains(char::is_control),
        "a pasted line could run: {second:?}"
    );

    let problem = &mut state.shown.problems.as_mut().expect("problems")[1];
    (problem.remedy, problem.commands) = ("check the network: select 1".into(), Vec::new());
    assert_eq!(press(&mut state, "y"), None);
    assert!(frame(&state, 80, 24).contains("There is no command to copy: check the network: select 1"));
}

#[test]
fn y_copies_the_command_for_a_message_when_it_was_read() {
    let mut state = state();
    let asked = Some(BoardRequest::Remedy {
        seq: 5_210_004,
        destination: "default".into(),
    });
    assert_eq!(press(&mut state, "y"), asked);
    let command = "outboxctl retry 5210004 --destination default";
    let reason = Reason {
        remedy: Some("retry it".into()),
        commands: [command, "outboxctl discard 5210004 --destination default"]
            .map(psql)
            .into(),
        ..Reason::default()
    };
    let copied = update(&mut state, BoardEvent::Remedy(Ok(Some(reason))));
    assert_eq!(copied, Some(BoardRequest::Copy(command.into())));
    assert!(frame(&state, 80, 24).contains(&format!("Copied: {command}")));
    press(&mut state, "\n");
    assert_eq!(press(&mut state, "y"), asked, "from its page");
    assert_eq!(
        update(&mut state, BoardEvent::Remedy(Err("permission denied".into()))),
        None
    );
    assert!(frame(&state, 80, 24).contains("permission denied"));
    assert_eq!(update(&mut state, BoardEvent::Remedy(Ok(None))), None);
    assert!(frame(&state, 80, 24).contains("There is no command to copy."));
}

#[test]
fn failed_messages_with_one_cause_are_one_row_until_it_is_opened() {
    let mut state = outage();
    let rows = ids(&state, Pane::Messages);
    assert_eq!(rows.len(), 4, "{rows:?}");
    let shown = frame(&state, 80, 24);
    let group = r#"▸ 150 × HTTP 422: order-# has "no" currency, or it's 100% wrong"#;
    assert!(shown.contains(group), "{shown}");
    assert!(shown.contains("▸ 30 × HTTP 503: closed"), "{shown}");
    let command = r#"outboxctl retry --destination default --error-like '%HTTP 422: order-% has "no" currency, or it'\''s 100\% wrong%'"#;
    assert_eq!(press(&mut state, "y"), Some(BoardRequest::Copy(command.into())));
    let shown: String = frame(&state, 80, 24).lines().rev().take(2).collect();
    assert!(
        shown.contains("Copied: outboxctl retry") && shown.contains("wrong%'"),
        "the whole command: {shown}"
    );
    state.may_act = true;
    assert_eq!(press(&mut state, "r"), None);
    assert_eq!(state.mode, BoardMode::Watch, "a group has no action");

    assert_eq!(press(&mut state, "\n"), None);
    assert_eq!(ids(&state, Pane::Messages).len(), 154);
    assert!(frame(&state, 80, 24).contains("▾ 150 × HTTP 422"));
    let opened = press(&mut state, "j\n");
    assert!(matches!(opened, Some(BoardRequest::Open { seq: 1, .. })), "{opened:?}");
    press(&mut state, "\u{1b}g\n");
    assert_eq!(ids(&state, Pane::Messages).len(), 4, "closed again");

    press(&mut state, "/order-77 \n");
    assert_eq!(
        ids(&state, Pane::Messages),
        ["77 default"],
        "a filter finds a message in a group"
    );
    press(&mut state, "\u{1b}s");
    assert_eq!(ids(&state, Pane::Messages).len(), 182, "an order is of single messages");
}

#[test]
fn a_group_says_that_there_may_be_more_and_its_retried_messages_need_no_command() {
    let mut state = outage();
    let messages = state.shown.messages.as_mut().expect("messages");
    let more = messages[0].clone();
    messages.extend((0..50).map(|n| crate::queries::model::Message {
        seq: 1_000 + n,
        ..more.clone()
    }));
    let shown = frame(&state, 80, 24);
    assert!(
        shown.contains("▸ 200+ × HTTP 422") && shown.contains("▸ 30 × HTTP 503"),
        "{shown}"
    );
    assert_eq!(press(&mut state, "jjy"), None);
    assert!(frame(&state, 80, 24).contains("There is no command to copy."));
}

#[test]
fn a_destination_in_trouble_stays_in_view_wherever_the_selection_is() {
    for (width, height) in [(60, 24), (80, 24), (120, 40), (200, 30)] {
        let mut state = outage();
        for keys in ["", "1", "2", "3", "G", "s", "ss", "4", "5G"] {
            press(&mut state, keys);
            let shown = frame(&state, width, height);
            let lines: Vec<&str> = shown.lines().filter(|line| !line.starts_with(['!', ' '])).collect();
            for (name, state) in [("webhook", "down"), ("zoll", "connecting"), ("slow", "connected")] {
                let is_row = |line: &&&str| line.contains(&format!("{name} ")) && line.contains(state);
                assert!(
                    lines.iter().any(|line| is_row(&line)),
                    "{name}, {keys:?} at {width}x{height}:\n{shown}"
                );
            }
        }
    }
}

#[test]
fn alerts_take_two_lines_of_a_small_terminal_and_six_of_another() {
    let mut state = outage();
    let of = |state: &BoardState, height: u16| -> Vec<String> {
        let shown = frame(state, 80, height);
        let lines = shown.lines().skip(1).take_while(|line| !line.starts_with(['┌', '┏']));
        lines.map(str::to_owned).collect()
    };
    let small = of(&state, 24);
    assert_eq!(small.len(), 2, "{small:?}");
    assert!(
        small[1].starts_with("  → start the receiver") && small[1].ends_with("  +3 more: h"),
        "{small:?}"
    );
    let large = of(&state, 40);
    assert_eq!(large.len(), 6, "{large:?}");
    assert!(large[5].ends_with("  +1 more: h"), "{large:?}");
    press(&mut state, "h");
    assert_eq!(of(&state, 24).len(), 0, "the page has them all");
    press(&mut state, "\u{1b}");
    state.shown.problems = Ok(Vec::new());
    assert_eq!(of(&state, 24).len(), 0);
}

#[test]
fn an_outage_on_a_small_terminal() {
    insta::assert_snapshot!("outage_80_columns_24_lines", frame(&outage(), 80, 24));
    insta::assert_snapshot!("outage_120_columns_40_lines", frame(&outage(), 120, 40));
}

fn of_message(verb: Verb) -> OperatorAction {
    OperatorAction {
        verb,
        seq: Some(5_210_004),
        destination: "default".into(),
    }
}

fn of_destination(verb: Verb, destination: &str) -> Option<BoardRequest> {
    Some(BoardRequest::Act(OperatorAction {
        verb,
        seq: None,
        destination: destination.into(),
    }))
}

#[test]
fn an_action_needs_the_flag_and_a_typed_y() {
    let mut state = state();
    assert_eq!(press(&mut state, "r"), None);
    assert_eq!(state.mode, BoardMode::Watch);
    assert!(frame(&state, 100, 40).contains("Actions are off: start with --allow-actions."));

    state.may_act = true;
    assert_eq!(press(&mut state, "r"), None);
    assert!(frame(&state, 100, 40).contains("Retry message 5210004 to default? Type y"));
    assert_eq!(press(&mut state, "n"), None);
    assert!(frame(&state, 100, 40).contains("Nothing was done."));
    for other in ["\n", "\u{1b}", "Y", "q", " "] {
        assert_eq!(press(&mut state, &format!("r{other}")), None, "{other:?}");
    }
    let act = |verb| Some(BoardRequest::Act(of_message(verb)));
    assert_eq!(press(&mut state, "ry"), act(Verb::Retry));
    assert_eq!(press(&mut state, "dy"), act(Verb::Discard));
    assert_eq!(
        press(&mut state, "\nry"),
        act(Verb::Retry),
        "from the page of the message"
    );

    let done = Notice {
        text: "Message 5210004 is delivered again.".into(),
        is_bad: false,
    };
    update(&mut state, BoardEvent::Done(done));
    assert!(frame(&state, 100, 40).contains("Message 5210004 is delivered again."));
}

#[test]
fn the_confirmed_action_is_carried_out_though_the_list_changes_meanwhile() {
    let mut state = state();
    state.may_act = true;
    press(&mut state, "d");
    let mut later = snapshot();
    later.messages.as_mut().expect("messages").remove(0);
    update(&mut state, BoardEvent::Snapshot(Box::new(later)));
    let discard = of_message(Verb::Discard);
    assert_eq!(press(&mut state, "y"), Some(BoardRequest::Act(discard)));
}

#[test]
fn a_destination_is_paused_or_resumed_by_its_state() {
    let mut state = state();
    state.may_act = true;
    press(&mut state, "p");
    assert!(
        state.notice.as_ref().is_some_and(|notice| notice.is_bad),
        "no destination is selected"
    );
    press(&mut state, "3");
    assert_eq!(press(&mut state, "py"), of_destination(Verb::Pause, "audit"));
    assert_eq!(
        press(&mut state, "jjpy"),
        of_destination(Verb::Resume, "einkauf-größe-ß")
    );
    press(&mut state, "r");
    assert!(
        state.notice.is_some_and(|notice| notice.is_bad),
        "no message is selected"
    );
}

#[test]
fn a_selected_row_stays_selected_when_others_are_added_and_removed() {
    let mut state = state();
    press(&mut state, "jj");
    let selected = |state: &BoardState| state.selected_id();
    assert_eq!(selected(&state).as_deref(), Some("5217002 default"));
    let mut later = snapshot();
    later.messages.as_mut().expect("messages").remove(0);
    update(&mut state, BoardEvent::Snapshot(Box::new(later.clone())));
    assert_eq!(selected(&state).as_deref(), Some("5217002 default"));
    later.messages.as_mut().expect("messages").remove(1);
    update(&mut state, BoardEvent::Snapshot(Box::new(later)));
    assert_eq!(
        selected(&state).as_deref(),
        Some("5217006 default"),
        "what stands in its place"
    );
    press(&mut state, "G");
    assert_eq!(selected(&state).as_deref(), Some("5217333 audit"));
    press(&mut state, "jgk");
    assert_eq!(selected(&state).as_deref(), Some("5210011 audit"));
}

fn ids(state: &BoardState, pane: Pane) -> Vec<String> {
    let (rows, _) = state.rows(pane).expect("rows");
    rows.into_iter().map(|row| row.id).collect()
}

#[test]
fn a_filter_and_an_order_are_of_one_pane() {
    let mut state = state();
    press(&mut state, "/order:42");
    assert_eq!(ids(&state, Pane::Messages).len(), 2, "while it is typed");
    assert!(frame(&state, 100, 40).contains("/order:42"));
    press(&mut state, "\n");
    assert_eq!(ids(&state, Pane::Messages), ["5210004 default", "5217006 default"]);
    assert_eq!(ids(&state, Pane::Destinations).len(), 3);
    press(&mut state, "/x\u{1b}");
    assert_eq!(ids(&state, Pane::Messages).len(), 2, "Esc leaves what was before");
    press(&mut state, "\u{1b}");
    assert_eq!(ids(&state, Pane::Messages).len(), 30);
    press(&mut state, "/DEAD\u{8}\u{8}\u{8}\u{8}dead\n");
    assert_eq!(ids(&state, Pane::Messages).len(), 2);

    press(&mut state, "3ss");
    assert!(frame(&state, 150, 40).contains("by state"));
    assert_eq!(
        ids(&state, Pane::Destinations),
        ["audit", "default", "einkauf-größe-ß"],
        "what is down is first"
    );
    press(&mut state, "s");
    assert_eq!(ids(&state, Pane::Destinations)[0], "audit", "by what is pending");
    press(&mut state, "ssssssssss");
    assert_eq!(state.panes[Pane::Destinations as usize].order, 0, "as they come");
}

#[test]
fn a_held_display_does_not_change_and_continues_with_the_current_state() {
    let mut state = state();
    let with_pending = |n: i64| {
        let mut snapshot = snapshot();
        snapshot.status.as_mut().expect("a status").pending = Some(n);
        BoardEvent::Snapshot(Box::new(snapshot))
    };
    press(&mut state, " ");
    assert!(frame(&state, 100, 40).contains("HELD"));
    update(&mut state, with_pending(1));
    update(&mut state, with_pending(77_777));
    assert!(frame(&state, 100, 40).contains("1,234"));
    press(&mut state, " ");
    assert!(frame(&state, 100, 40).contains("77,777"));
}

#[test]
fn the_rate_uses_seconds_of_the_database_and_restarts_with_it() {
    let mut state = state();
    state.per_s.clear();
    for (epoch_s, total) in [(2.0, 20), (4.0, 30), (5.0, 5), (6.0, 9)] {
        let mut snapshot = snapshot();
        snapshot.now.epoch_s = 1_763_738_405.0 + epoch_s;
        snapshot.status.as_mut().expect("a status").published_total = Some(5_216_077 + total);
        update(&mut state, BoardEvent::Snapshot(Box::new(snapshot)));
    }
    assert_eq!(state.per_s, [10.0, 5.0, 4.0]);
}

#[test]
fn the_interval_goes_through_its_steps_and_stops_at_the_ends() {
    let mut state = state();
    let ms = |ms| Some(BoardRequest::Interval(Duration::from_millis(ms)));
    assert_eq!(press(&mut state, "+"), ms(2_000));
    assert_eq!(press(&mut state, "--"), ms(500));
    assert_eq!(press(&mut state, "-"), ms(200));
    assert_eq!(press(&mut state, "-"), None);
    assert!(frame(&state, 100, 40).contains("every 200 ms"));
    assert_eq!(press(&mut state, "++++++++"), ms(300_000));
    assert_eq!(press(&mut state, "+"), None);
}

#[test]
fn panes_are_selected_by_number_and_by_tab_and_q_ends() {
    for (mut state, keys) in [(state(), "12345"), (full_worker_state(), "1234567")] {
        for (key, pane) in keys.chars().zip(Pane::ALL) {
            press(&mut state, &key.to_string());
            assert_eq!(state.pane, pane);
        }
        press(&mut state, "\t");
        assert_eq!(state.pane, Pane::Partitions);
        assert_eq!(press(&mut state, "?q"), None, "q left the help");
        assert_eq!(press(&mut state, "q"), Some(BoardRequest::End));
        assert_eq!(press(&mut state, "q"), Some(BoardRequest::End), "the second request");
    }
}

// ---- the worker of `outboxctl work` ---------------------------------------------------------------------------------

#[test]
fn work_shows_the_board_and_its_worker_in_one_two_and_three_columns() {
    for (width, height) in [(60, 110), (100, 50), (150, 50), (200, 50)] {
        insta::assert_snapshot!(
            format!("work_{width}_columns"),
            frame(&full_worker_state(), width, height)
        );
    }
    insta::assert_snapshot!("work_80_columns_24_lines", frame(&full_worker_state(), 80, 24));
    let mut state = full_worker_state();
    press(&mut state, "?");
    insta::assert_snapshot!("work_help", frame(&state, 80, 24));
}

#[test]
fn without_the_database_work_shows_its_worker_and_the_reason() {
    let mut state = worker_state();
    insta::assert_snapshot!("work_without_database", frame(&state, 100, 40));
    let gone = Err::<(), String>("permission \u{1b}[1mdenied for view outbox_status".into());
    state.take(Box::new(Snapshot {
        status: gone.map(|()| unreachable!()),
        ..snapshot()
    }));
    let shown = frame(&state, 100, 40);
    assert!(shown.contains("1,218,304") && shown.contains("7 Log"), "{shown}");
    assert!(!shown.contains("2 Workers"), "{shown}");
}

/// The same values as on the screen of the reference: for the window if there is one, otherwise since the start.
#[test]
fn the_panel_of_the_worker_shows_heartbeat_passes_leases_and_the_end_of_the_window() {
    let with_window = frame(&full_worker_state(), 100, 50);
    for part in [
        "heartbeat 2.4 s ago",
        "backoff",
        "last lease +1 -0",
        "in this window, the next in 6.2 s",
        "20 passes of 12.5 ms each",
        "4,240 claimed, 4,180 sent, 3 not",
        "1 purged, 8 leased, 2 released",
    ] {
        let found = with_window.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(found.contains(part), "{part}: {with_window}");
    }
    let mut state = full_worker_state();
    state.own.as_mut().expect("a worker").window = None;
    assert!(frame(&state, 100, 50).contains("in all passes since the start"));
}

#[test]
fn the_panel_of_the_worker_says_that_there_are_no_leases() {
    let mut state = full_worker_state();
    let facts = |state: &mut BoardState, change: fn(&mut WorkerFacts)| {
        change(state.own.as_mut().and_then(|own| own.facts.as_mut()).expect("facts"));
    };
    facts(&mut state, |facts| {
        (facts.owned, facts.sharing) = (0, Sharing::RowClaims)
    });
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("rows, by claims") && shown.contains("partitions any"),
        "{shown}"
    );
    facts(&mut state, |facts| {
        (facts.is_alone, facts.sharing) = (true, Sharing::Leases)
    });
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("--no-leasing") && shown.contains("partitions 0 of 8"),
        "{shown}"
    );
}

#[test]
fn the_docs_of_work_show_the_current_frame() {
    let docs = include_str!("../../../../docs/work.md");
    // The docs show realistic texts instead of hostile ones.
    let mut state = full_worker_state();
    let own = state.own.as_mut().expect("a worker");
    for destination in &mut own.facts.as_mut().expect("facts").destinations {
        let finding = destination.status.finding.iter_mut();
        finding.for_each(|finding| replace_hostile(&mut finding.detail, "paused by ann"));
    }
    for line in &mut own.log {
        replace_hostile(&mut line.text, "destination einkauf-größe-ß: paused");
    }
    without_hostile_texts(&mut state);
    let shown = frame(&state, 100, 50);
    assert!(docs.contains(&shown), "docs/work.md must show this frame:\n{shown}");
}

#[test]
fn a_destination_and_a_line_of_the_log_are_shown_in_full() {
    let mut state = full_worker_state();
    for (keys, wanted) in [
        ("6\n", "unreachable: audit.internal:5671: connection refused"),
        ("\u{1b}7jj\n", "message 5210019 is a dead letter"),
    ] {
        press(&mut state, keys);
        let shown = frame(&state, 100, 30);
        assert!(shown.contains(wanted), "{wanted}:\n{shown}");
    }
}

#[test]
fn a_banner_says_why_nothing_is_delivered_and_the_end_comes_first() {
    let mut state = full_worker_state();
    let own = state.own.clone().expect("a worker");
    let now = state.now;
    let take = |state: &mut BoardState, change: &dyn Fn(&mut OwnWorker), ends: bool| {
        let mut own = Box::new(own.clone());
        change(&mut own);
        update(state, BoardEvent::Worker { own, now, ends });
        frame(state, 100, 40)
    };
    let copy = |own: &mut OwnWorker| {
        let facts = own.facts.as_mut().expect("facts");
        facts.obstacle = Some("a copy \u{1b}[31mof another".into());
    };
    assert!(take(&mut state, &copy, false).contains("NOTHING IS DELIVERED: a copy ␛[31mof another."));
    assert_eq!(press(&mut state, " "), Some(BoardRequest::Hold(true)));
    assert!(frame(&state, 100, 40).contains("HELD: claims nothing"));
    let lost = |own: &mut OwnWorker| {
        own.lost = Some(("the server went \u{1b}[31maway".into(), now - Duration::from_secs(3)));
    };
    update(&mut state, BoardEvent::Lost("the same".into(), Duration::from_secs(1)));
    let shown = take(&mut state, &lost, false);
    assert!(
        shown.contains("SESSION LOST for 3.0 s: the server went ␛[31maway."),
        "{shown}"
    );
    assert!(shown.contains("1,218,304"), "the last values stay:\n{shown}");
    assert!(take(&mut state, &lost, true).contains("ENDING"));
    assert_eq!(press(&mut state, " "), Some(BoardRequest::Hold(false)));
    assert!(take(&mut state, &|_| (), false).contains("Connection lost: the same."));
}

#[test]
fn the_log_shows_new_lines_unless_another_line_is_selected() {
    let mut state = full_worker_state();
    let grow = |state: &mut BoardState| {
        let (mut own, now) = (state.own.clone().expect("a worker"), state.now);
        let mut line = own.log[0].clone();
        line.number += 1;
        own.log.push_front(line);
        update(
            state,
            BoardEvent::Worker {
                own: Box::new(own),
                now,
                ends: false,
            },
        );
    };
    let newest = |state: &BoardState| state.own.as_ref().map(|own| own.log[0].number.to_string());
    grow(&mut state);
    assert_eq!(state.selected_id(), newest(&state));
    press(&mut state, "j");
    let selected = state.selected_id();
    grow(&mut state);
    assert_eq!(state.selected_id(), selected);
    press(&mut state, "g");
    grow(&mut state);
    assert_eq!(state.selected_id(), newest(&state));
}

#[test]
fn the_throughput_of_the_worker_is_per_second_also_when_frames_are_frequent() {
    let (own, now) = worker();
    let mut state = BoardState::of_worker(own.clone());
    for (ms, published) in [(250, 10), (1_000, 30), (1_250, 35), (2_250, 50), (2_500, 65)] {
        let mut own = own.clone();
        own.facts.as_mut().expect("facts").ended.published = published;
        state.take_own(own, now + Duration::from_millis(ms));
        update(&mut state, BoardEvent::Snapshot(Box::new(snapshot())));
    }
    assert_eq!(state.per_s, [25.0, 15.0]);
}

#[test]
fn work_has_no_actions() {
    let mut state = full_worker_state();
    for keys in ["5r", "d", "p"] {
        assert_eq!(press(&mut state, keys), None);
        assert_eq!(state.mode, BoardMode::Watch, "it asks nothing");
    }
    assert!(frame(&state, 100, 40).contains("Actions need outboxctl top --allow-actions."));
}

// ---- properties -----------------------------------------------------------------------------------------------------

fn gone<T>() -> Part<T> {
    Err("gone".into())
}

fn some_state() -> impl Strategy<Value = BoardState> {
    let parts = proptest::array::uniform8(any::<bool>());
    let keys = proptest::collection::vec(
        prop_oneof![
            Just('\n'),
            Just('\t'),
            Just('\u{1b}'),
            Just('\u{8}'),
            proptest::char::range(' ', '~')
        ],
        0..30,
    );
    (parts, keys, any::<bool>(), any::<bool>(), 0..3).prop_map(|(are_there, keys, may_act, is_lost, kind)| {
        let mut state = match kind {
            0 => state(),
            1 => worker_state(),
            _ => full_worker_state(),
        };
        state.may_act = may_act;
        let all = snapshot();
        state.shown = Snapshot {
            status: if are_there[0] { all.status } else { gone() },
            throughput: if are_there[1] { all.throughput } else { Ok(vec![]) },
            partitions: if are_there[2] { all.partitions } else { Ok(vec![]) },
            workers: if are_there[3] { all.workers } else { gone() },
            destinations: if are_there[4] { all.destinations } else { Ok(vec![]) },
            errors: if are_there[5] { all.errors } else { Ok(vec![]) },
            messages: if are_there[6] { all.messages } else { Ok(vec![]) },
            problems: if are_there[7] { all.problems } else { Ok(vec![]) },
            ..all
        };
        if is_lost {
            state.lost = Some(("gone".into(), Duration::ZERO));
        }
        for key in keys {
            press(&mut state, &key.to_string());
        }
        state
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_terminal_of_any_size_is_drawn(state in some_state(), width in 1_u16..260, height in 1_u16..90) {
        buffer(&state, width, height);
        view::height_of_all(&state, width);
    }

    #[test]
    fn only_q_ends_the_worker(keys in "[a-pr-z1-9? \\n\\t\\x1b+-]{0,60}") {
        let mut state = full_worker_state();
        for key in keys.chars() {
            prop_assert_ne!(press(&mut state, &key.to_string()), Some(BoardRequest::End));
        }
    }

    #[test]
    fn no_keys_act_without_the_flag_and_a_y(keys in "[a-z1-5/ \\n\\x1b+?-]{0,60}") {
        for (may_act, forbidden) in [(false, "\0"), (true, "y")] {
            let mut state = state();
            state.may_act = may_act;
            for key in keys.chars().filter(|key| !forbidden.contains(*key)) {
                let asked = press(&mut state, &key.to_string());
                prop_assert!(!matches!(asked, Some(BoardRequest::Act(_))), "{:?}", asked);
            }
        }
    }
}
