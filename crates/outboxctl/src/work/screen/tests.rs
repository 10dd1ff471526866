//! Frames of a made-up worker at the widths of `top`, and the effects of keys. `INSTA_UPDATE=always cargo test -p
//! outboxctl` accepts changed frames: read the diff before you commit it.

use super::fixture::{snapshot, state};
use super::state::{Mode, Pane, State};
use super::update::{Event, Request, update};
use super::view;
use crate::screen::frame::as_text;
use crate::screen::terminal::Input;
use crate::screen::theme::Theme;
use crate::screen::trial::{self, HOSTILE, replace_hostile};
use crate::work::snapshot::{Phase, Sharing, Snapshot};
use proptest::prelude::*;
use ratatui::buffer::Buffer;

fn press(state: &mut State, keys: &str) -> Option<Request> {
    trial::press(keys, |key| update(state, Event::Input(Input::Key(key))))
}

fn buffer(state: &State, width: u16, height: u16) -> Buffer {
    trial::buffer(width, height, |frame| view::draw(state, frame))
}

fn frame(state: &State, width: u16, height: u16) -> String {
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
    insta::assert_snapshot!("80_columns_24_lines", frame(&state, 80, 24));
    press(&mut state, "1");
    insta::assert_snapshot!("60_columns_24_lines", frame(&state, 60, 24));
}

#[test]
fn a_wide_terminal_has_two_columns_and_a_very_wide_one_three() {
    insta::assert_snapshot!("100_columns", frame(&state(), 100, 44));
    insta::assert_snapshot!("150_columns", frame(&state(), 150, 44));
    insta::assert_snapshot!("200_columns", frame(&state(), 200, 50));
}

/// The same values as on the screen of the reference: for the window if there is one, otherwise since the start.
#[test]
fn the_worker_panel_shows_heartbeat_passes_leases_and_the_end_of_the_window() {
    let with_window = frame(&state(), 100, 44);
    for part in [
        "heartbeat     2.4 s ago",
        "backoff",
        "last lease    +1 -0",
        "in this window, the next in 6.2 s",
        "20 passes of 12.5 ms each",
        "4,240 claimed, 4,180 sent, 3 not",
        "1 purged, 8 leased, 2 released",
    ] {
        let found = with_window.split_whitespace().collect::<Vec<_>>().join(" ");
        let wanted = part.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(found.contains(&wanted), "{part}: {with_window}");
    }
    let mut state = state();
    state.snapshot.passes.as_mut().expect("passes").refresh_s = None;
    assert!(frame(&state, 100, 44).contains("in all passes since the start"));
}

#[test]
fn the_docs_show_the_current_frame() {
    let docs = include_str!("../../../../../docs/work.md");
    // The docs show realistic texts instead of hostile ones.
    let mut state = state();
    for error in &mut state.snapshot.errors {
        replace_hostile(&mut error.message, "HTTP 422: no such index");
    }
    for destination in &mut state.snapshot.destinations {
        destination
            .detail
            .iter_mut()
            .for_each(|detail| replace_hostile(detail, "paused by ann"));
    }
    for line in &mut state.snapshot.log {
        replace_hostile(&mut line.text, "destination einkauf-größe-ß: paused");
    }
    let shown = frame(&state, 100, 44);
    assert!(docs.contains(&shown), "docs/work.md must show this frame:\n{shown}");
}

#[test]
fn help_and_a_row_are_shown_in_full() {
    let mut state = state();
    press(&mut state, "?");
    insta::assert_snapshot!("help", frame(&state, 80, 24));
    for (keys, wanted) in [
        ("\u{1b}1\n", "down unreachable: audit.internal:5671: connection refused"),
        ("\u{1b}2kk\n", "message 5210019 is a dead letter"),
        ("\u{1b}3\n", "unroutable, 27 times, the last with message 5210027"),
        ("\u{1b}4j\n", "leased here in epoch 5811204777"),
    ] {
        press(&mut state, keys);
        assert!(matches!(state.mode, Mode::Row { .. }));
        let shown = frame(&state, 100, 30);
        assert!(shown.contains(wanted), "{wanted}:\n{shown}");
    }
    // A new snapshot does not change the open row.
    update(&mut state, Event::Snapshot(Box::default()));
    assert!(frame(&state, 100, 30).contains("leased here in epoch 5811204777"));
}

#[test]
fn a_banner_says_why_nothing_is_delivered_and_the_end_comes_first() {
    let mut state = state();
    let take = |state: &mut State, snapshot: Snapshot| update(state, Event::Snapshot(Box::new(snapshot)));
    let copy = Snapshot {
        obstacle: Some("a copy \u{1b}[31mof another".into()),
        ..snapshot()
    };
    take(&mut state, copy.clone());
    assert!(frame(&state, 100, 40).contains("NOTHING IS DELIVERED: a copy ␛[31mof another."));
    assert_eq!(press(&mut state, " "), Some(Request::Hold(true)));
    assert!(frame(&state, 100, 40).contains("HELD: claims nothing"));
    let lost = Phase::Lost {
        why: "the server went \u{1b}[31maway".into(),
        since_s: 3.0,
    };
    take(&mut state, Snapshot { phase: lost, ..copy });
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("SESSION LOST for 3.0 s: the server went ␛[31maway."),
        "{shown}"
    );
    assert!(shown.contains("1,218,304"), "the last values stay:\n{shown}");
    update(&mut state, Event::Ends);
    assert!(frame(&state, 100, 40).contains("ENDING"));
    take(&mut state, snapshot());
    assert!(frame(&state, 100, 40).contains("ENDING"));
}

#[test]
fn the_worker_panel_says_that_there_are_no_leases() {
    let mut state = state();
    state.snapshot.waiting.clear();
    state.snapshot.sharing = Sharing::RowClaims;
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("rows, by claims") && shown.contains("partitions any"),
        "{shown}"
    );
    state.snapshot.sharing = Sharing::Alone;
    let shown = frame(&state, 100, 40);
    assert!(
        shown.contains("--no-leasing") && shown.contains("partitions 0 of 8"),
        "{shown}"
    );
}

#[test]
fn partitions_that_cannot_be_counted_are_still_listed() {
    let mut state = state();
    state.snapshot.uncounted = Some("permission \u{1b}[1mdenied".into());
    let shown = frame(&state, 100, 44);
    assert!(shown.contains("not counted: permission"), "{shown}");
    assert!(shown.contains("␛[1mdenied") && shown.contains("p14"), "{shown}");
}

#[test]
fn no_control_character_of_a_hostile_text_reaches_the_terminal() {
    let mut state = state();
    state.snapshot.who.worker_id = HOSTILE.into();
    for keys in ["1G", "\n", "\u{1b}2G", "\n", "\u{1b}3j", "\n"] {
        press(&mut state, keys);
        trial::assert_harmless(|frame| view::draw(&state, frame));
    }
}

#[test]
fn without_colours_no_cell_has_one_and_the_text_is_the_same() {
    let mut plain = state();
    plain.theme = Theme { has_colour: false };
    trial::assert_same_without_colours(|frame| view::draw(&state(), frame), |frame| view::draw(&plain, frame));
}

// ---- keys -----------------------------------------------------------------------------------------------------------

#[test]
fn the_log_follows_new_lines_until_a_scroll_and_again_at_its_end() {
    let mut state = state();
    let last = state.rows(Pane::Log) - 1;
    let grow = |state: &mut State| {
        let mut snapshot = state.snapshot.clone();
        snapshot.log.push(snapshot.log[0].clone());
        update(state, Event::Snapshot(Box::new(snapshot)));
    };
    assert_eq!(state.at(Pane::Log), last);
    grow(&mut state);
    assert_eq!(state.at(Pane::Log), last + 1);
    press(&mut state, "k");
    grow(&mut state);
    assert_eq!(state.at(Pane::Log), last, "the selection stays after a scroll");
    press(&mut state, "jj");
    grow(&mut state);
    assert_eq!(state.at(Pane::Log), last + 3);
    press(&mut state, "g");
    assert_eq!(state.at(Pane::Log), 0);
}

#[test]
fn panes_are_selected_by_number_and_by_tab_and_q_ends() {
    let mut state = state();
    for (key, pane) in ["1", "2", "3", "4"].into_iter().zip(Pane::ALL) {
        press(&mut state, key);
        assert_eq!(state.pane, pane);
    }
    press(&mut state, "\t");
    assert_eq!(state.pane, Pane::Destinations);
    assert_eq!(press(&mut state, "?q"), None, "q leaves the help");
    assert_eq!(press(&mut state, "q"), Some(Request::End));
    assert_eq!(press(&mut state, "q"), Some(Request::End), "the second request");
}

#[test]
fn space_holds_and_resumes() {
    let mut state = state();
    assert_eq!(press(&mut state, " "), Some(Request::Hold(true)));
    assert_eq!(press(&mut state, "?   q"), None, "in the help space scrolls");
    assert_eq!(press(&mut state, " "), Some(Request::Hold(false)));
}

#[test]
fn the_throughput_is_per_second_also_when_frames_are_rare() {
    let mut state = State::new(Snapshot::default(), Theme { has_colour: false });
    for (up_s, published) in [(0.25, 10), (1.0, 30), (1.5, 40), (1.75, 45), (5.0, 65)] {
        let mut snapshot = Snapshot { up_s, ..snapshot() };
        snapshot.ended.published = published;
        update(&mut state, Event::Snapshot(Box::new(snapshot)));
    }
    assert_eq!(state.session.per_s, [30.0, 8.75]);
}

// ---- properties -----------------------------------------------------------------------------------------------------

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_terminal_of_any_size_is_drawn(
        keys in "[a-z1-4? \\n\\t\\x1bG]{0,20}", parts in proptest::array::uniform4(any::<bool>()), width in 1_u16..260, height in 1_u16..90,
    ) {
        let mut state = state();
        let mut snapshot = snapshot();
        if parts[0] { snapshot.destinations.clear(); }
        if parts[1] { snapshot.log.clear(); }
        if parts[2] { snapshot.errors.clear(); }
        if parts[3] { snapshot.waiting.clear(); }
        press(&mut state, &keys);
        update(&mut state, Event::Snapshot(Box::new(snapshot)));
        buffer(&state, width, height);
        press(&mut state, &keys);
        buffer(&state, width, height);
    }

    #[test]
    fn only_q_ends_the_worker(keys in "[a-pr-z1-9? \\n\\t\\x1b+-]{0,60}") {
        let mut state = state();
        for key in keys.chars() {
            prop_assert_ne!(press(&mut state, &key.to_string()), Some(Request::End));
        }
    }
}
