//! Login and logout.

use super::context::{Fields, Site};
use super::page::{head, problem};
use axum::extract::{Form, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use maud::{DOCTYPE, Markup, html};
use std::sync::Arc;

pub async fn show_login(State(site): State<Arc<Site>>, Form(fields): Form<Fields>) -> Response {
    match site.access.asks_for_secret() {
        true => form(fields.get("to"), false).into_response(),
        false => Redirect::to("/").into_response(),
    }
}

pub async fn login(State(site): State<Arc<Site>>, headers: HeaderMap, Form(fields): Form<Fields>) -> Response {
    let (secret, to) = (fields.get("secret"), fields.get("to"));
    match site.access.login(secret.trim(), &headers).await {
        Some(cookie) => ([(header::SET_COOKIE, cookie)], Redirect::to(own_path(to))).into_response(),
        None => (StatusCode::UNAUTHORIZED, form(to, true)).into_response(),
    }
}

pub async fn logout(State(site): State<Arc<Site>>, headers: HeaderMap) -> Response {
    let cookie = site.access.logout(&headers);
    ([(header::SET_COOKIE, cookie)], Redirect::to("/login")).into_response()
}

/// A path of this monitor, never another site: `//evil.example` and `/\evil.example` are addresses to a browser.
fn own_path(to: &str) -> &str {
    let is_own = to.starts_with('/') && !to.starts_with("//") && !to.contains(['\\', '\r', '\n', '\t']);
    if is_own { to } else { "/" }
}

/// The only page without a login.
fn form(to: &str, has_failed: bool) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head("Log in"))
            body.login {
                main #main {
                    h1 { img src="/icon.svg" alt="" width="32" height="32"; " Outbox Monitor" }
                    @if has_failed { (problem("Wrong token.", "")) }
                    form.confirm method="post" action="/login" {
                        input type="hidden" name="to" value=(to);
                        label for="secret" { "Token" }
                        input #secret name="secret" type="password" autocomplete="current-password" required autofocus;
                        button.primary { "Log in" }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_never_leads_to_another_site() {
        assert_eq!(own_path("/messages?tab=dead"), "/messages?tab=dead");
        for to in [
            "",
            "https://evil.example",
            "//evil.example",
            "/\\evil.example",
            "/\t/evil.example",
        ] {
            assert_eq!(own_path(to), "/", "{to}");
        }
    }
}
