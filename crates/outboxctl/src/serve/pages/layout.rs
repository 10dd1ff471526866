//! The frame of all pages: the navigation, the live parts, and small marks.

use crate::queries::state::DestinationState::{self, Missing, NotServed, Reported};
use crate::queries::state::{MessageStatus, Parsed};
use crate::serve::access::Viewer;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use outbox_worker::State;
use std::sync::Arc;

/// A page with live parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    Overview,
    Messages,
    Destinations,
    Partitions,
    Workers,
    Audit,
    /// Forms and answers.
    Other,
}

const NAVIGATION: [Page; 6] = [
    Page::Overview,
    Page::Messages,
    Page::Destinations,
    Page::Partitions,
    Page::Workers,
    Page::Audit,
];

impl Page {
    pub fn word(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Messages => "messages",
            Self::Destinations => "destinations",
            Self::Partitions => "partitions",
            Self::Workers => "workers",
            Self::Audit => "audit",
            Self::Other => "other",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        NAVIGATION.into_iter().find(|page| page.word() == word)
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Messages => "Messages",
            Self::Destinations => "Destinations",
            Self::Partitions => "Partitions",
            Self::Workers => "Workers",
            Self::Audit => "Audit",
            Self::Other => "Outbox Monitor",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Overview | Self::Other => "/",
            Self::Messages => "/messages",
            Self::Destinations => "/destinations",
            Self::Partitions => "/partitions",
            Self::Workers => "/workers",
            Self::Audit => "/audit",
        }
    }
}

/// A part of a page: the id of its element, and its markup.
pub type Part = (&'static str, String);

/// All parts, from one reading of the database.
#[derive(Default)]
pub struct Live {
    pub(super) pulse: Vec<Part>,
    /// The strip of alerts for the overview, unfolded, and for the other pages.
    pub(super) alerts: Vec<Part>,
    pub(super) folded_alerts: Vec<Part>,
    pub(super) overview: Vec<Part>,
    pub(super) destinations: Vec<Part>,
    pub(super) partitions: Vec<Part>,
    pub(super) workers: Vec<Part>,
    /// Changes when a message has changed its state.
    pub change: String,
}

impl Live {
    pub fn parts(&self, page: Page) -> impl Iterator<Item = &Part> {
        let own = match page {
            Page::Overview => &self.overview[..],
            Page::Destinations => &self.destinations,
            Page::Partitions => &self.partitions,
            Page::Workers => &self.workers,
            Page::Messages | Page::Audit | Page::Other => &[],
        };
        let alerts = match page {
            Page::Overview => &self.alerts,
            _ => &self.folded_alerts,
        };
        self.pulse.iter().chain(alerts).chain(own)
    }

    /// The element of a part.
    pub(super) fn part(&self, page: Page, id: &'static str) -> Markup {
        let found = self.parts(page).find(|(name, _)| *name == id);
        html! { div id=(id) data-live { @if let Some((_, text)) = found { (PreEscaped(text)) } } }
    }
}

/// What the frame of every page shows.
pub struct PageFrame {
    pub live: Arc<Live>,
    pub viewer: Viewer,
    pub database: String,
}

/// The frame of every page but the login.
pub fn layout(page: Page, title: &str, frame: &PageFrame, body: &Markup) -> Markup {
    let (live, viewer, database) = (&frame.live, &frame.viewer, &frame.database);
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(title))
            body class=[viewer.may_act.then_some("may-act")] data-page=(page.word()) data-change=(live.change) {
                a.skip href="#main" { "Skip to the content" }
                header.top {
                    a.brand href="/" { img src="/icon.svg" alt="" width="24" height="24"; " Outbox Monitor" }
                    nav aria-label="Pages" {
                        ul {
                            @for (index, item) in NAVIGATION.into_iter().enumerate() {
                                li { a href=(item.path()) aria-current=[(item == page).then_some("page")] data-key=(index + 1) {
                                    (item.title())
                                } }
                            }
                        }
                    }
                    div.state {
                        span.database title="database" { (database) }
                        span #pulse data-live {
                            @for (_, text) in live.parts(page).filter(|(id, _)| *id == "pulse") { (PreEscaped(text)) }
                        }
                        @if let Some(name) = &viewer.name { span.who { (name) } }
                        @if viewer.logged_in {
                            form method="post" action="/logout" { (form_token(viewer)) button.quiet { "Log out" } }
                        }
                    }
                }
                main #main tabindex="-1" {
                    @if page != Page::Overview { (live.part(page, "alerts")) } // there the numbers come first
                    (body)
                }
                footer {
                    span { "outboxctl " (env!("CARGO_PKG_VERSION")) }
                    button.quiet #help-button type="button" { "Keys: ?" }
                }
                (help())
            }
        }
    }
}

pub fn head(title: &str) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            title { (title) " · Outbox Monitor" }
            link rel="icon" href="/icon.svg" type="image/svg+xml";
            link rel="stylesheet" href="/style.css";
            script src="/app.js" defer {}
        }
    }
}

fn help() -> Markup {
    html! {
        dialog #help aria-labelledby="help-title" {
            h2 #help-title { "Keys" }
            dl.keys {
                div { dt { kbd { "1" } " – " kbd { "6" } } dd { "the pages" } }
                div { dt { kbd { "/" } } dd { "search messages" } }
                div { dt { kbd { "j" } " " kbd { "k" } } dd { "next, previous line" } }
                div { dt { kbd { "Enter" } } dd { "open the line" } }
                div { dt { kbd { "Space" } } dd { "pause the page, and continue" } }
                div { dt { kbd { "?" } } dd { "this help" } }
            }
            form method="dialog" { button { "Close" } }
        }
    }
}

/// The token of a form with an action.
pub fn form_token(viewer: &Viewer) -> Markup {
    html! { input type="hidden" name="form_token" value=(viewer.form_token); }
}

/// A bar that is `part` of `whole` long. An SVG, because the policy of the page allows no inline style.
pub(super) fn bar(part: f64, whole: f64, what: &str) -> Markup {
    let percent = if whole > 0.0 {
        (part / whole * 100.0).clamp(0.0, 100.0)
    } else {
        0.0
    };
    html! {
        svg.bar.low[percent < 25.0] viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=(what) {
            rect.rail width="100" height="6" {}
            rect.fill width=(format!("{percent:.0}")) height="6" {}
        }
    }
}

/// The colour of a state.
#[derive(Clone, Copy)]
pub(super) enum Tone {
    Ok,
    Warn,
    Bad,
    Plain,
}

impl Tone {
    pub fn of_state(state: Option<DestinationState>) -> Self {
        match state {
            Some(Reported(State::Connected)) => Self::Ok,
            Some(Reported(State::Paused | State::Pausing | State::Connecting | State::Starting | State::Blocked)) => {
                Self::Warn
            }
            Some(Reported(State::Down | State::Unconfigured | State::NotAdopted) | NotServed | Missing) => Self::Bad,
            None => Self::Plain,
        }
    }

    pub fn of_status(status: Option<MessageStatus>) -> Self {
        match status {
            Some(MessageStatus::Published) => Self::Ok,
            Some(MessageStatus::Retrying | MessageStatus::Blocked | MessageStatus::Scheduled) => Self::Warn,
            Some(MessageStatus::Dead) => Self::Bad,
            Some(MessageStatus::Ready | MessageStatus::InFlight | MessageStatus::Discarded) | None => Self::Plain,
        }
    }
}

/// A state, with the colour of its meaning.
pub(super) fn badge(word: &str, tone: Tone) -> Markup {
    let class = match tone {
        Tone::Ok => "ok",
        Tone::Warn => "warn",
        Tone::Bad => "bad",
        Tone::Plain => "plain",
    };
    html! { span class={ "badge " (class) } { (word) } }
}

/// The state of a destination.
pub(super) fn state_badge(state: &Parsed<DestinationState>) -> Markup {
    badge(state.as_str(), Tone::of_state(state.known()))
}
