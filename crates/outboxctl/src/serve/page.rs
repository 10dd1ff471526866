//! The pages of the monitor, their live parts, and the marks that several of them have.

use super::base::BasePath;
use crate::queries::state::{Parsed, Tone, Toned};
use maud::{Markup, PreEscaped, html};
use outbox_core::remedy::alternatives;
use outbox_core::words::Word;

outbox_core::words! {
    /// A page of the navigation, by its word in addresses.
    pub enum MonitorPage {
        Overview = "overview",
        Messages = "messages",
        Destinations = "destinations",
        Partitions = "partitions",
        Workers = "workers",
        Audit = "audit",
        /// Forms and answers.
        Other = "other",
    }
}

impl MonitorPage {
    /// Its address below the base path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Overview => "./",
            page => page.name(),
        }
    }
}

/// A part of pages that the event stream updates.
pub struct LivePart {
    pub pages: &'static [MonitorPage],
    /// Of its element.
    pub id: &'static str,
    pub markup: String,
}

/// All parts, from one reading of the database.
pub struct LiveParts {
    pub parts: Vec<LivePart>,
    /// The number of alerts, as the title of a page begins: empty, or `(2) `.
    pub problems: String,
    /// Changes when a message has changed its state.
    pub change: String,
}

impl LiveParts {
    pub fn of_page(&self, page: MonitorPage) -> impl Iterator<Item = &LivePart> {
        self.parts.iter().filter(move |part| part.pages.contains(&page))
    }

    /// The content of a part. Empty: it has not been read.
    pub fn content(&self, page: MonitorPage, id: &str) -> Markup {
        let found = self.of_page(page).find(|part| part.id == id);
        html! { @if let Some(part) = found { (PreEscaped(&part.markup)) } }
    }

    /// The element of a part.
    pub fn element(&self, page: MonitorPage, id: &str) -> Markup {
        html! { div id=(id) data-live { (self.content(page, id)) } }
    }
}

/// The head of a page. All links of a page are relative to the base path.
pub fn head(base: &BasePath, title: &str) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            base href=(base.to(""));
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            title { (title) " · Outbox Monitor" }
            link rel="icon" href="icon.svg" type="image/svg+xml";
            link rel="stylesheet" href="style.css";
            script src="app.js" defer {}
        }
    }
}

/// Why nothing was done.
pub fn problem(title: &str, text: &str) -> Markup {
    html! { div.banner.bad role="alert" { strong { (title) } p { (text) } } }
}

/// Statements for psql.
pub fn as_sql<'a>(statements: impl IntoIterator<Item = &'a str>) -> Markup {
    html! { details { summary { "As SQL" } @for sql in statements { (copyable_block(sql)) } } }
}

/// A text of one line, with a button of the script that copies it.
pub fn copyable(text: &str) -> Markup {
    html! { span.copyable { span { (text) } (copy_button()) } }
}

/// A command, a statement or a payload, with the same button.
pub fn copyable_block(text: &str) -> Markup {
    html! { div.copyable { pre tabindex="0" { (text) } (copy_button()) } }
}

fn copy_button() -> Markup {
    html! { button.copy type="button" { "Copy" } }
}

/// What removes a cause: commands, one a line, or a sentence. A control character in a text that is pasted could run
/// another command.
pub fn remedy(text: &str) -> Markup {
    const PROGRAMS: [&str; 7] = ["outboxctl", "select", "alter", "create", "drop", "commit", "rollback"];
    let is_command = |part: &&str| {
        let first = part.split(' ').next().unwrap_or_default().to_lowercase();
        PROGRAMS.contains(&&*first)
    };
    let parts = alternatives(text);
    html! {
        @if parts.iter().all(is_command) && !text.contains(char::is_control) { @for part in parts { (copyable_block(part)) } }
        @else { p.remedy { "Fix: " (text) } }
    }
}

/// A bar that is `part` of `whole` long. An SVG, because the policy of the page allows no inline style.
pub fn bar(part: f64, whole: f64, what: &str) -> Markup {
    let percent = (part / whole.max(f64::MIN_POSITIVE) * 100.0).clamp(0.0, 100.0);
    html! {
        svg.bar viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=(what) {
            rect.rail width="100" height="6" {}
            rect.fill width=(format!("{percent:.0}")) height="6" {}
        }
    }
}

/// A word, with the colour of its meaning.
pub fn badge(word: &str, tone: Tone) -> Markup {
    html! { span class={ "badge " (tone.name()) } { (word) } }
}

pub fn state_badge(state: &Parsed<impl Toned>) -> Markup {
    badge(state.as_str(), state.tone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_of_a_remedy_has_a_line_and_a_sentence_has_none() {
        let lines = |text: &str| remedy(text).into_string().matches("<pre").count();
        assert_eq!(lines("outboxctl retry 7, or outboxctl discard 7"), 2);
        assert_eq!(lines("ALTER SYSTEM SET outbox.workers = 2"), 1);
        assert_eq!(lines("start them, or take their names out of the setting"), 0);
        let quoted = "COMMIT PREPARED 'x, or select evil(); --', or ROLLBACK PREPARED 'x, or select evil(); --'";
        assert_eq!(lines(quoted), 2);
        assert_eq!(
            lines("COMMIT PREPARED '\u{15}select evil();'"),
            0,
            "a terminal deletes the line"
        );
    }
}
