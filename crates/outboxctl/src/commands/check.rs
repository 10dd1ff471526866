//! `outboxctl check`: checks whether a destination can be used. Workers that are not connected to it try at once.

use super::{Context, text};
use crate::failure::{Code, Failure};
use crate::output::{self, Cell, Colour, Table};
use clap::Args;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(Args)]
pub struct CheckArgs {
    /// Destination
    #[arg(default_value = "default")]
    destination: String,
}

pub async fn run(context: &Context, args: &CheckArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let steps = session
        .rows(
            "select step, ok, detail from outbox_check($1::text)",
            &[&args.destination],
        )
        .await?;
    // NULL means that no worker knows: that is no failure.
    let failed = steps.iter().any(|step| step["ok"] == false);
    if context.json {
        context.print_json(&json!({ "destination": args.destination, "ok": !failed, "steps": steps }))?;
    } else {
        output::print(&table(&steps).render())?;
    }
    Ok(match failed {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
}

fn table(steps: &[Value]) -> Table {
    let mut table = Table::new(&["STEP", "OK", "DETAIL"]);
    for step in steps {
        let (ok, colour) = match step["ok"].as_bool() {
            Some(true) => ("yes", Colour::Good),
            Some(false) => ("no", Colour::Bad),
            None => ("unknown", Colour::Careful),
        };
        table.row([
            text(step, "step").into(),
            Cell::coloured(ok, Some(colour)),
            text(step, "detail").into(),
        ]);
    }
    table
}
