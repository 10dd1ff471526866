//! The pages of the monitor, their live parts, and the marks that several of them have.

use super::base::BasePath;
use crate::queries::model::CommandShown;
use crate::queries::state::{Parsed, Tone, Toned};
use maud::{Markup, PreEscaped, html};
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

/// What removes a cause: a sentence, unless it is only its commands, and the commands, with where they run. A control
/// character in a text that is pasted could run another command.
pub fn remedy(text: &str, commands: &[CommandShown]) -> Markup {
    let all: Vec<&str> = commands.iter().map(|command| &*command.command).collect();
    let is_safe = |command: &&CommandShown| !command.command.contains(char::is_control);
    let shown: Vec<&CommandShown> = commands.iter().filter(is_safe).collect();
    let is_only_commands = shown.len() == all.len() && all.join(", or ") == text;
    html! {
        @if !is_only_commands { p.remedy { "Fix: " (text) } }
        @for same in shown.chunk_by(|a, b| (&a.place, &a.role) == (&b.place, &b.role)) {
            @for command in same { (copyable_block(&command.command)) }
            p.note { (whereabouts(same[0])) }
        }
    }
}

/// `in psql, as a superuser`
fn whereabouts(command: &CommandShown) -> String {
    let place = match &*command.place {
        "shell" => "in a shell".to_owned(),
        place if place.starts_with("shell of ") => format!("in the {place}"),
        place => format!("in {place}"),
    };
    match &command.role {
        Some(role) => format!("{place}, as {role}"),
        None => place,
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

    fn command(command: &str, place: &str, role: Option<&str>) -> CommandShown {
        CommandShown {
            command: command.into(),
            place: place.into(),
            role: role.map(Into::into),
        }
    }

    #[test]
    fn a_remedy_is_a_sentence_and_commands_or_only_commands() {
        let shown = |text: &str, commands: &[CommandShown]| {
            let markup = remedy(text, commands).into_string();
            (markup.contains("Fix: "), markup.matches("<pre").count())
        };
        let [retry, discard] = ["outboxctl retry 7", "outboxctl discard 7"].map(|text| command(text, "shell", None));
        let both = "outboxctl retry 7, or outboxctl discard 7";
        assert_eq!(shown(both, &[retry.clone(), discard]), (false, 2));
        assert_eq!(shown(both, &[retry]), (true, 1));
        assert_eq!(shown("ALTER SYSTEM is no command of the data", &[]), (true, 0));
        let hostile = "COMMIT PREPARED '\u{15}select evil();'"; // a terminal deletes the line
        assert_eq!(shown(hostile, &[command(hostile, "psql", None)]), (true, 0));
    }

    #[test]
    fn a_command_has_a_note_that_says_where_it_runs() {
        let commands = [
            command("outboxctl retry 7", "shell", None),
            command("outboxctl discard 7", "shell", None),
            command("kill -CONT 12", "shell of the database server", None),
            command("select 1", "psql", Some("a superuser")),
        ];
        let markup = remedy("any", &commands).into_string();
        let notes: Vec<&str> = markup
            .split("<p class=\"note\">")
            .skip(1)
            .filter_map(|rest| rest.split('<').next())
            .collect();
        assert_eq!(
            notes,
            [
                "in a shell",
                "in the shell of the database server",
                "in psql, as a superuser"
            ]
        );
    }
}
