//! `outboxctl check`: checks whether a destination can be used. Workers that are not connected to it try immediately.

use super::{CommandContext, exit_code, text};
use crate::failure::Failure;
use crate::output;
use crate::screen::list::{ListRow, RowField};
use crate::screen::theme;
use clap::Args;
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
    let sql = "select step, ok, detail from @extschema@.outbox_check($1::text)";
    let steps = session.rows(sql, &[&args.destination]).await?;
    // NULL means that no worker knows: that is no failure.
    let is_ok = steps.iter().all(|step| step["ok"] != false);
    match context.json {
        true => context.print_json(&json!({ "destination": args.destination, "ok": is_ok, "steps": steps }))?,
        false => output::print_rows(&steps.iter().map(row).collect::<Vec<_>>())?,
    }
    Ok(exit_code(is_ok))
}

fn row(step: &Value) -> ListRow {
    let (ok, style) = match step["ok"].as_bool() {
        Some(true) => ("yes", theme::GOOD),
        Some(false) => ("no", theme::BAD),
        None => ("unknown", theme::WARNING),
    };
    let fields = vec![
        RowField::words("step", 0, text(step, "step")),
        RowField::words("ok", 0, ok).style(style),
        RowField::prose("detail", 0, 24, text(step, "detail")),
    ];
    ListRow::new("", fields)
}
