//! Login and logout.

use super::base::BasePath;
use super::context::{Fields, PageRequest};
use super::page::{head, problem};
use axum::extract::Form;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};

pub async fn show_login(request: PageRequest, Form(fields): Form<Fields>) -> Response {
    match request.site.access.asks_for_secret() {
        true => form(&request.base, fields.get("to"), false).into_response(),
        false => request.redirect(""),
    }
}

pub async fn login(request: PageRequest, headers: HeaderMap, Form(fields): Form<Fields>) -> Response {
    let (secret, to) = (fields.get("secret"), fields.get("to"));
    match request.site.access.login(secret.trim(), &headers).await {
        Some(cookie) => ([(header::SET_COOKIE, cookie)], request.redirect(own_link(to))).into_response(),
        None => (StatusCode::UNAUTHORIZED, form(&request.base, to, true)).into_response(),
    }
}

pub async fn logout(request: PageRequest, headers: HeaderMap) -> Response {
    let cookie = request.site.access.logout(&headers);
    ([(header::SET_COOKIE, cookie)], request.redirect("login")).into_response()
}

/// The link to a path of this monitor, never to another site: `//evil.example` and `/\evil.example` are addresses to a
/// browser.
fn own_link(to: &str) -> &str {
    let link = to.strip_prefix('/').filter(|link| !link.starts_with('/'));
    link.filter(|link| !link.contains(['\\', '\r', '\n', '\t']))
        .unwrap_or_default()
}

/// The only page without a login.
fn form(base: &BasePath, to: &str, has_failed: bool) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(base, "Log in"))
            body.login {
                main #main {
                    h1 { img src="icon.svg" alt="" width="32" height="32"; " Outbox Monitor" }
                    @if has_failed { (problem("Wrong password.", "")) }
                    form.confirm method="post" action="login" {
                        input type="hidden" name="to" value=(to);
                        label for="secret" { "Password" }
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
        assert_eq!(own_link("/messages?tab=dead"), "messages?tab=dead");
        for to in [
            "",
            "https://evil.example",
            "//evil.example",
            "/\\evil.example",
            "/\t/evil.example",
        ] {
            assert_eq!(own_link(to), "", "{to}");
        }
    }
}
