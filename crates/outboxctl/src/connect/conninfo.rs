//! Parses connection strings like libpq: `keyword = value` pairs and URIs. No I/O.
//!
//! No error contains the string itself, because it may contain a password.

use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;
use std::fmt;

/// Every keyword of libpq, with its environment variable. `refuse_unsupported` refuses the ones that this program does
/// not support: an unknown keyword is a typo, but a known one that is ignored could silently weaken a connection.
pub const KEYWORDS: &[(&str, &str)] = &[
    ("application_name", "PGAPPNAME"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("client_encoding", "PGCLIENTENCODING"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("dbname", "PGDATABASE"),
    ("fallback_application_name", ""),
    ("gssdelegation", "PGGSSDELEGATION"),
    ("gssencmode", "PGGSSENCMODE"),
    ("gsslib", "PGGSSLIB"),
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("keepalives", ""),
    ("keepalives_count", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("krbsrvname", "PGKRBSRVNAME"),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
    ("options", "PGOPTIONS"),
    ("passfile", "PGPASSFILE"),
    ("password", "PGPASSWORD"),
    ("port", "PGPORT"),
    ("replication", ""),
    ("require_auth", "PGREQUIREAUTH"),
    ("requirepeer", "PGREQUIREPEER"),
    ("service", "PGSERVICE"),
    ("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("sslcert", "PGSSLCERT"),
    ("sslcertmode", "PGSSLCERTMODE"),
    ("sslcompression", "PGSSLCOMPRESSION"),
    ("sslcrl", "PGSSLCRL"),
    ("sslcrldir", "PGSSLCRLDIR"),
    ("sslkey", "PGSSLKEY"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslpassword", ""),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslsni", "PGSSLSNI"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("tcp_user_timeout", ""),
    ("user", "PGUSER"),
];

/// The connection parameters collected so far.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Params(BTreeMap<&'static str, String>);

impl Params {
    /// Sets a parameter, and replaces its previous value. Returns false if the keyword does not exist.
    pub fn set(&mut self, keyword: &str, value: impl Into<String>) -> bool {
        let known = KEYWORDS.iter().find(|(name, _)| *name == keyword);
        if let Some((name, _)) = known {
            self.0.insert(name, value.into());
        }
        known.is_some()
    }

    /// Whether a parameter was given, even if it is empty.
    pub fn has(&self, keyword: &str) -> bool {
        self.0.contains_key(keyword)
    }

    /// The value of a parameter. An empty value counts as not given, so the default applies.
    pub fn get(&self, keyword: &str) -> Option<&str> {
        self.0
            .get(keyword)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// Takes over all parameters of `stronger`.
    pub fn override_with(&mut self, stronger: Params) {
        self.0.extend(stronger.0);
    }
}

/// A password is a secret, so no format string may show it.
impl fmt::Debug for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.iter().filter(|(name, _)| !name.contains("password"));
        f.debug_map().entries(shown).finish()
    }
}

/// Whether the text given as a database name is a connection string.
pub fn is_connection_string(text: &str) -> bool {
    without_scheme(text).is_some() || text.contains('=')
}

/// Parses a connection string of either kind.
pub fn parse(text: &str) -> Result<Params, String> {
    match without_scheme(text) {
        Some(rest) => parse_uri(rest),
        None => parse_words(text),
    }
}

fn without_scheme(text: &str) -> Option<&str> {
    text.strip_prefix("postgresql://")
        .or_else(|| text.strip_prefix("postgres://"))
}

// ---- keyword = value ------------------------------------------------------------------------------------------------

fn parse_words(text: &str) -> Result<Params, String> {
    let mut params = Params::default();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_ascii_whitespace());
        let (keyword, after) = rest.split_at(end.unwrap_or(rest.len()));
        let Some(after) = after.trim_start().strip_prefix('=') else {
            // The error does not show the word: it may be the end of a password with a blank in it.
            return Err("a word of the connection string has no \"=\" after it".into());
        };
        let (value, after) = word_value(after.trim_start())?;
        if !params.set(keyword, value) {
            return Err(format!("unknown connection parameter {keyword:?}"));
        }
        rest = after.trim_start();
    }
    Ok(params)
}

/// A value, and the text that follows it. A backslash escapes the next character, with or without quotes.
fn word_value(text: &str) -> Result<(String, &str), String> {
    let quoted = text.strip_prefix('\'');
    let body = quoted.unwrap_or(text);
    let mut value = String::new();
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            '\'' if quoted.is_some() => return Ok((value, &body[at + 1..])),
            c if quoted.is_none() && c.is_ascii_whitespace() => return Ok((value, &body[at..])),
            c => value.push(c),
        }
    }
    match quoted {
        Some(_) => Err("a quoted value of the connection string has no end".into()),
        None => Ok((value, "")),
    }
}

// ---- URI ------------------------------------------------------------------------------------------------------------

fn parse_uri(rest: &str) -> Result<Params, String> {
    let mut params = Params::default();
    let mut set = |keyword: &str, value: &str| -> Result<(), String> {
        let value = decode(value)?;
        if !value.is_empty() {
            params.set(keyword, value);
        }
        Ok(())
    };
    let (mut authority, rest) = split_at_any(rest, &['/', '?']);
    // Like libpq, up to the first "@": in a password it is written as %40.
    if let Some((credentials, hosts)) = authority.split_once('@') {
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        set("user", user)?;
        set("password", password)?;
        authority = hosts;
    }
    let (hosts, ports) = hosts_and_ports(authority)?;
    set("host", &hosts)?;
    set("port", &ports)?;
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    set("dbname", path.strip_prefix('/').unwrap_or(path))?;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((keyword, value)) = pair.split_once('=') else {
            return Err("a parameter of the URI has no \"=\"".into());
        };
        let (keyword, value) = (decode(keyword)?, decode(value)?);
        // Drivers for Java write ssl=true.
        let known = match (keyword.as_str(), value.as_str()) {
            ("ssl", "true") => params.set("sslmode", "require"),
            _ => params.set(&keyword, value),
        };
        if !known {
            return Err(format!("unknown parameter {keyword:?} in the URI"));
        }
    }
    Ok(params)
}

/// The hosts and the ports of the URI, each as a list with commas like the keywords `host` and `port`.
fn hosts_and_ports(authority: &str) -> Result<(String, String), String> {
    let mut pairs = Vec::new();
    for one in authority.split(',') {
        pairs.push(match one.strip_prefix('[') {
            None => one.split_once(':').unwrap_or((one, "")),
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or("an IPv6 address in the URI has no \"]\"")?;
                match port.strip_prefix(':') {
                    Some(port) => (host, port),
                    None if port.is_empty() => (host, ""),
                    None => return Err("the URI has something other than a port after \"]\"".into()),
                }
            }
        });
    }
    let (hosts, ports): (Vec<&str>, Vec<&str>) = pairs.into_iter().unzip();
    // Nothing but commas means the default.
    let join = |list: Vec<&str>| Some(list.join(",")).filter(|list| !list.trim_matches(',').is_empty());
    Ok((join(hosts).unwrap_or_default(), join(ports).unwrap_or_default()))
}

fn split_at_any<'a>(text: &'a str, marks: &[char]) -> (&'a str, &'a str) {
    text.split_at(text.find(marks).unwrap_or(text.len()))
}

fn decode(text: &str) -> Result<String, String> {
    let is_code = |code: &str| {
        let digits = code.bytes().take(2).filter(u8::is_ascii_hexdigit);
        digits.count() == 2 && !code.starts_with("00")
    };
    if !text.split('%').skip(1).all(is_code) {
        return Err("the URI has a \"%\" without two hexadecimal digits after it, or %00".into());
    }
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| "the decoded URI is not UTF-8")?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<(&'static str, String)> {
        parse(text)
            .unwrap_or_else(|error| panic!("{text}: {error}"))
            .0
            .into_iter()
            .collect()
    }

    fn pairs(wanted: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        wanted
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect()
    }

    #[test]
    fn pairs_are_parsed_with_blanks_quotes_and_backslashes() {
        assert_eq!(
            parsed(
                r"host=a  port = 5433
                user='it\'s me' password=a\ b dbname = 'C:\\d' options=''"
            ),
            pairs(&[
                ("dbname", r"C:\d"),
                ("host", "a"),
                ("options", ""),
                ("password", "a b"),
                ("port", "5433"),
                ("user", "it's me"),
            ])
        );
        assert_eq!(parsed("  "), []);
        let words = parse("host='' port=1 port=2").expect("words");
        assert!(
            words.has("host") && words.get("host").is_none(),
            "an empty value means the default"
        );
        assert_eq!(words.get("port"), Some("2"), "the last value wins");
    }

    #[test]
    fn every_part_of_a_uri_is_parsed() {
        assert_eq!(
            parsed("postgresql://me:s%40y@db.example:5433/shop?application_name=a%20b&sslmode=verify-full"),
            pairs(&[
                ("application_name", "a b"),
                ("dbname", "shop"),
                ("host", "db.example"),
                ("password", "s@y"),
                ("port", "5433"),
                ("sslmode", "verify-full"),
                ("user", "me"),
            ])
        );
        assert_eq!(parsed("postgres://"), []);
        assert_eq!(parsed("postgres:///shop"), pairs(&[("dbname", "shop")]));
        assert_eq!(
            parsed("postgres://[::1]:5433"),
            pairs(&[("host", "::1"), ("port", "5433")])
        );
        assert_eq!(
            parsed("postgres://a:1,b,c:3/"),
            pairs(&[("host", "a,b,c"), ("port", "1,,3")])
        );
        assert_eq!(
            parsed("postgres://%2Frun%2Fpg/d"),
            pairs(&[("dbname", "d"), ("host", "/run/pg")])
        );
        assert_eq!(
            parsed("postgres://me@/d?host=/run/pg&ssl=true"),
            pairs(&[
                ("dbname", "d"),
                ("host", "/run/pg"),
                ("sslmode", "require"),
                ("user", "me")
            ])
        );
        // A colon in the password, and a question mark right after the host.
        assert_eq!(
            parsed("postgres://me:a:b@h?port=7"),
            pairs(&[("host", "h"), ("password", "a:b"), ("port", "7"), ("user", "me")])
        );
    }

    #[test]
    fn an_error_never_contains_a_password() {
        for text in [
            "host",
            "host=a hunter2",
            "password='hunter2",
            "password=hunter2 nonsense=1",
            "postgres://me:hunter2@[::1",
            "postgres://me:hunter2@[::1]x",
            "postgres://me:hunter2%@h",
            "postgres://me:hunter2%0",
            "postgres://me:hunter2%00@h",
            "postgres://me:hunter2@h?sslmode",
            "postgres://me:hunter2@h?nonsense=1",
            "postgres://me:hunter2@h?%ff=1",
        ] {
            let error = parse(text).expect_err(text);
            assert!(!error.contains("hunter2") && error.len() > 20, "{text}: {error}");
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic() {
        for text in [
            "ü",
            "=ü",
            "ü='",
            r"a='ü\",
            "a=\\",
            "postgres://ü:ü@[ü]:ü,ü/ü?ü=ü",
            "postgres://%ü",
            "postgres://[ü",
            "postgres://?=",
            "postgres://@:@",
            "=",
        ] {
            let _ = parse(text);
        }
        assert_eq!(
            parsed("postgres://ü@ü/%C3%BC"),
            pairs(&[("dbname", "ü"), ("host", "ü"), ("user", "ü")])
        );
    }

    #[test]
    fn a_debug_print_shows_no_password() {
        let shown = format!(
            "{:?}",
            parse("user=me password=hunter2 sslpassword=hunter3").expect("words")
        );
        assert!(shown.contains("me") && !shown.contains("hunter"), "{shown}");
    }

    #[test]
    fn a_database_name_is_not_a_connection_string() {
        assert!(
            ["a=b", "postgres://h", "postgresql://"]
                .iter()
                .all(|text| is_connection_string(text))
        );
        assert!(!["shop", "", "http://h"].iter().any(|text| is_connection_string(text)));
    }
}
