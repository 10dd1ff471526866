//! What every handler of a page has: the shared state, the view that it shows, and its viewer. Its answers are pages.

use super::access::Viewer;
use super::app::{App, View};
use super::pages::act::refusal;
use super::pages::layout::PageFrame;
use super::session::{Trouble, TroubleKind, WAIT_MAX};
use crate::failure::{Code, Failure};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use maud::Markup;
use std::sync::Arc;

pub struct PageContext {
    pub app: Arc<App>,
    pub view: Arc<View>,
    pub frame: PageFrame,
}

impl FromRequestParts<Arc<App>> for PageContext {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, StatusCode> {
        // The guard has admitted a viewer to all pages but those of the login.
        let viewer = parts.extensions.get::<Viewer>().cloned();
        let view = app.view();
        Ok(Self {
            app: Arc::clone(app),
            frame: PageFrame {
                live: Arc::clone(&view.live),
                viewer: viewer.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?,
                database: app.database.clone(),
            },
            view,
        })
    }
}

pub fn page(markup: &Markup) -> Response {
    Html(markup.0.clone()).into_response()
}

impl PageContext {
    /// The page for an error of the database.
    pub fn trouble(&self, trouble: &Trouble) -> Response {
        let (status, title) = match (trouble.kind, trouble.failure.code) {
            (TroubleKind::Busy, _) => (StatusCode::SERVICE_UNAVAILABLE, "The monitor is busy"),
            (TroubleKind::TimedOut, _) => (StatusCode::SERVICE_UNAVAILABLE, "That took too long"),
            (_, Code::CannotConnect) => (StatusCode::SERVICE_UNAVAILABLE, "The database refused"),
            (_, Code::Usage) => (StatusCode::BAD_REQUEST, "The database refused"),
            _ => (StatusCode::UNPROCESSABLE_ENTITY, "The database refused"),
        };
        let mut answer = (status, page(&refusal(&self.frame, title, &trouble.failure))).into_response();
        if trouble.kind == TroubleKind::Busy {
            let wait_s = HeaderValue::from(WAIT_MAX.as_secs());
            answer.headers_mut().insert(header::RETRY_AFTER, wait_s);
        }
        answer
    }

    /// The page for a request that is not carried out.
    pub fn refused(&self, failure: &Failure) -> Response {
        let status = match failure.code {
            Code::Refused => StatusCode::FORBIDDEN,
            Code::SomeFailed => StatusCode::CONFLICT,
            _ => StatusCode::BAD_REQUEST,
        };
        (status, page(&refusal(&self.frame, "Nothing was done", failure))).into_response()
    }
}
