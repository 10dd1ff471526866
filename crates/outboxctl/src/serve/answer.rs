//! A page as the answer to a request, and the page for an error.

use super::access::Viewer;
use super::app::App;
use super::pages::act::refusal;
use super::session::Trouble;
use crate::failure::Code;
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use maud::Markup;

pub fn page(markup: &Markup) -> Response {
    Html(markup.0.clone()).into_response()
}

/// The page for an error of the database.
pub fn trouble(app: &App, viewer: &Viewer, trouble: &Trouble) -> Response {
    let status = match trouble.failure.code {
        Code::CannotConnect => StatusCode::SERVICE_UNAVAILABLE,
        _ if trouble.timed_out => StatusCode::SERVICE_UNAVAILABLE,
        Code::Usage => StatusCode::BAD_REQUEST,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    };
    let title = match trouble.timed_out {
        true => "That took too long",
        false => "The database refused",
    };
    let said = refusal(&app.view().live, viewer, &app.database, title, &trouble.failure);
    (status, page(&said)).into_response()
}
