//! A page as the answer to a request, and the page for an error.

use super::access::Viewer;
use super::app::App;
use super::pages::act::refusal;
use super::session::{Trouble, TroubleKind, WAIT_MAX};
use crate::failure::Code;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use maud::Markup;

pub fn page(markup: &Markup) -> Response {
    Html(markup.0.clone()).into_response()
}

/// The page for an error of the database.
pub fn trouble(app: &App, viewer: &Viewer, trouble: &Trouble) -> Response {
    let (status, title) = match (trouble.kind, trouble.failure.code) {
        (TroubleKind::Busy, _) => (StatusCode::SERVICE_UNAVAILABLE, "The monitor is busy"),
        (TroubleKind::TimedOut, _) => (StatusCode::SERVICE_UNAVAILABLE, "That took too long"),
        (_, Code::CannotConnect) => (StatusCode::SERVICE_UNAVAILABLE, "The database refused"),
        (_, Code::Usage) => (StatusCode::BAD_REQUEST, "The database refused"),
        _ => (StatusCode::UNPROCESSABLE_ENTITY, "The database refused"),
    };
    let said = refusal(&app.view().live, viewer, &app.database, title, &trouble.failure);
    let mut answer = (status, page(&said)).into_response();
    if trouble.kind == TroubleKind::Busy {
        let wait_s = HeaderValue::from(WAIT_MAX.as_secs());
        answer.headers_mut().insert(header::RETRY_AFTER, wait_s);
    }
    answer
}
