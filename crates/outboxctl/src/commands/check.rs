//! `outboxctl check`: checks whether a destination can be used. Workers that are not connected to it try immediately.

use super::{CommandContext, cell, exit_code, text};
use crate::failure::Failure;
use crate::output::{self, Table};
use crate::screen::theme;
use clap::Args;
use ratatui::text::Span;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(Args)]
pub struct CheckArgs {
    /// Destination
    #[arg(default_value = "default")]
    destination: String,
}

pub async fn run(context: &CommandContext, args: &CheckArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let sql = "select step, ok, detail from outbox_check($1::text)";
    let steps = session.rows(sql, &[&args.destination]).await?;
    // NULL means that no worker knows: that is no failure.
    let is_ok = steps.iter().all(|step| step["ok"] != false);
    match context.json {
        true => context.print_json(&json!({ "destination": args.destination, "ok": is_ok, "steps": steps }))?,
        false => {
            let columns: &[(_, &dyn Fn(&Value) -> Span<'static>)] = &[
                ("STEP", &cell(text, "step")),
                ("OK", &|step| match step["ok"].as_bool() {
                    Some(true) => Span::styled("yes", theme::GOOD),
                    Some(false) => Span::styled("no", theme::BAD),
                    None => Span::styled("unknown", theme::WARNING),
                }),
                ("DETAIL", &cell(text, "detail")),
            ];
            output::print_lines(Table::of(&steps, columns).lines())?;
        }
    }
    Ok(exit_code(is_ok))
}
