//! The page of the audit: the manual actions.

use super::context::{Fields, PageContext};
use super::format::{count, encode, known, time};
use super::page::MonitorPage;
use super::session_pool::MonitorSession;
use crate::queries::Fetch;
use axum::extract::Form;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;

/// Actions on a page.
const PAGE: usize = 100;

#[derive(Deserialize)]
struct AuditEntry {
    at: f64,
    actor: String,
    acted_as: String,
    action: String,
    filter: String,
    count: Option<i64>,
    reason: Option<String>,
    application_name: Option<String>,
    cursor: String,
}

const AUDIT: &str = "
    select extract(epoch from at)::float8 as at, actor, acted_as, action, left(filter::text, 1000) as filter, count, reason,
           application_name, at::text as cursor
    from @extschema@.outbox_audit where $1::text is null or at < $1::text::timestamptz order by outbox_audit.at desc limit 101";

pub async fn audit(context: PageContext, Form(fields): Form<Fields>) -> Response {
    let before = fields.given("before");
    let read = async |session: &MonitorSession| session.fetch(AUDIT, &[&before]).await;
    let entries = context.database.pool.read(read).await;
    context.answer(entries.map(|entries| shown(&context, entries)))
}

fn shown(context: &PageContext, mut entries: Vec<AuditEntry>) -> Markup {
    let has_more = entries.len() > PAGE;
    entries.truncate(PAGE);
    let body = html! {
        p.lead { "Manual actions, the latest first." }
        @if entries.is_empty() { p.empty { "Nothing." } }
        @else { div.scroll tabindex="0" role="region" aria-label="Audit" { table.stack {
            thead { tr { th { "At (UTC)" } th { "Who" } th { "What" } th.n { "Messages" } th { "Asked for" } th { "Reason" } } }
            tbody { @for entry in &entries { tr {
                td.time data-label="At" { (time(entry.at)) }
                td data-label="Who" { (entry.actor) @if entry.acted_as != entry.actor { " as " (entry.acted_as) }
                    @if let Some(name) = entry.application_name.as_deref().filter(|name| !name.is_empty()) { span.note { " by " (name) } } }
                td data-label="What" { (entry.action) }
                td.n data-label="Messages" { (known(entry.count, count)) }
                td data-label="Asked for" { code { (entry.filter) } }
                td data-label="Reason" { (entry.reason.as_deref().unwrap_or("–")) }
            } } }
        } } }
        @if let Some(last) = entries.last().filter(|_| has_more) {
            p.pages { a.button rel="next" href={ "audit?before=" (encode(&last.cursor)) } { "Older" } }
        }
    };
    context.layout(MonitorPage::Audit, "Audit", &body)
}
