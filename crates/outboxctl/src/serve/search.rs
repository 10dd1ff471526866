//! The search language of the messages: `type:OrderPlaced agg:order:42 partition:p07 destination:audit error:timeout
//! since:2h key:order:42 id:UUID correlation:ID`, in any order, each once. One word may have no name: it is searched
//! for in all of them. All must match. Pure.

use crate::messages::filter::uuid;
use crate::messages::sql::containing;
use crate::messages::{Filter, When, partition};

pub const WORDS: [&str; 10] = [
    "type",
    "agg",
    "partition",
    "destination",
    "error",
    "since",
    "key",
    "id",
    "correlation",
    "seq",
];

pub fn parse(text: &str) -> Result<Filter, String> {
    let mut filter = Filter::default();
    let mut used = Vec::new();
    for token in tokens(text)? {
        let known = token.split_once(':').filter(|(word, _)| WORDS.contains(word));
        let Some((word, value)) = known else {
            bare(&mut filter, token)?;
            continue;
        };
        if value.is_empty() {
            return Err(format!("{word}: has no value"));
        }
        if used.iter().any(|known| known == word) {
            return Err(format!("{word}: is used twice"));
        }
        used.push(word.to_owned());
        set(&mut filter, word, value)?;
    }
    Ok(filter)
}

/// The criteria of a search, each as a search of its own. Only of one that can be parsed.
pub fn criteria(text: &str) -> Vec<String> {
    let one = |token: String| match token.split_once(':').filter(|(name, _)| WORDS.contains(name)) {
        Some((name, value)) => word(name, value),
        None if token.contains(|c: char| c.is_whitespace() || c == '"') => quoted(&token),
        None => token,
    };
    tokens(text).unwrap_or_default().into_iter().map(one).collect()
}

/// A word that looks like the name of a criterion and is none, in a search that takes it as a text.
pub fn unknown_name(text: &str) -> Option<String> {
    let name = |token: String| Some(token.split_once(':')?.0.to_owned());
    let is_unknown = |name: &String| name.bytes().all(|byte| byte.is_ascii_lowercase()) && !WORDS.contains(&&**name);
    tokens(text).ok()?.into_iter().filter_map(name).find(is_unknown)
}

/// A word without a name: an id, or a word to search for everywhere.
fn bare(filter: &mut Filter, token: String) -> Result<(), String> {
    match uuid(&token) {
        Ok(id) if filter.id.is_none() => filter.id = Some(id),
        _ if filter.word.is_none() => filter.word = Some(token),
        _ => {
            return Err(format!(
                "only one word can be searched for: put quotes around several words, or one of {} before \"{token}\"",
                WORDS.map(|word| format!("{word}:")).join(" ")
            ));
        }
    }
    Ok(())
}

fn set(filter: &mut Filter, word: &str, value: &str) -> Result<(), String> {
    let text = Some(value.to_owned());
    match word {
        "type" => filter.event_type = text,
        "agg" => {
            let (kind, id) = value
                .split_once(':')
                .map_or((value, None), |(kind, id)| (kind, Some(id)));
            filter.aggregate_type = Some(kind.to_owned());
            filter.aggregate_id = id.filter(|id| !id.is_empty()).map(str::to_owned);
        }
        "key" => filter.key = text,
        "partition" => {
            let parsed = partition(value);
            filter.partition = Some(parsed.map_err(|_| format!("{value} is not a partition: write it as p07"))?);
        }
        "destination" => filter.destination = text,
        // A star stands for any text, and so for a number that differs from message to message.
        "error" => filter.error_like = Some(containing(value).replace('*', "%")),
        "since" => filter.since = Some(since(value)?),
        "id" => filter.id = Some(uuid(value)?),
        "correlation" => filter.correlation_id = text,
        _ => {
            let seq = value
                .parse()
                .map_err(|_| format!("{value} is not a seq, which is a number"))?;
            filter.seq = Some(seq);
        }
    }
    Ok(())
}

/// A word of the language; its value may contain spaces and quotes.
pub fn word(name: &str, value: &str) -> String {
    let plain = !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c == '"');
    match plain {
        true => format!("{name}:{value}"),
        false => format!("{name}:{}", quoted(value)),
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// The search for the messages of an error group. The text of a group has `#` in place of numbers and ids.
pub fn of_group(destination: &str, message: &str) -> String {
    let destination = word("destination", destination);
    match message.trim_matches(['#', ' ']).is_empty() {
        true => destination,
        false => format!("{destination} {}", word("error", &message.replace('#', "*"))),
    }
}

/// `15m`, `2h`, `3d`, `30s`, a day or a time.
fn since(value: &str) -> Result<When, String> {
    const MOMENTS: [&str; 3] = ["9999-99-99", "9999-99-99T99:99", "9999-99-99T99:99:99"];
    const SECONDS_MAX: i64 = 36_500 * 86_400;
    let Ok(when) = value.parse::<When>();
    let is_known = match &when {
        When::SecondsAgo(seconds) => *seconds <= SECONDS_MAX,
        // Only these: other texts that Postgres accepts depend on settings, or are words such as "allballs".
        When::At(moment) => {
            let digits = |c: char| if c.is_ascii_digit() { '9' } else { c };
            let shape: String = moment.chars().map(digits).collect();
            MOMENTS.contains(&shape.strip_suffix('Z').unwrap_or(&shape))
        }
    };
    is_known
        .then_some(when)
        .ok_or_else(|| format!("since:{value} is not a time: write 30s, 15m, 2h, 3d, or 2026-01-31T12:00"))
}

/// Words between spaces; `"…"` keeps spaces together, and `\"` is a quote.
fn tokens(text: &str) -> Result<Vec<String>, String> {
    let mut tokens = Vec::new();
    let mut token = String::new();
    let (mut quoted, mut begun) = (false, false);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\0' => return Err("a NUL cannot be searched for".to_owned()),
            '"' => {
                quoted = !quoted;
                begun = true;
            }
            '\\' if quoted => token.extend(chars.next()),
            c if c.is_whitespace() && !quoted => {
                if begun {
                    tokens.push(std::mem::take(&mut token));
                }
                begun = false;
            }
            c => {
                token.push(c);
                begun = true;
            }
        }
    }
    if quoted {
        return Err("a quote is not closed".to_owned());
    }
    if begun {
        tokens.push(token);
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Filter {
        parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_word_finds_its_place() {
        let search = parsed(
            r#"type:OrderPlaced  agg:order:4:2 partition:p07 destination:audit error:"no route \"x\"" key:a:b seq:17"#,
        );
        assert_eq!(search.event_type.as_deref(), Some("OrderPlaced"));
        assert_eq!(search.aggregate_type.as_deref(), Some("order"));
        assert_eq!(search.aggregate_id.as_deref(), Some("4:2"));
        assert_eq!(search.partition, partition("p07").ok());
        assert_eq!(search.destination.as_deref(), Some("audit"));
        assert_eq!(search.error_like.as_deref(), Some(r#"%no route "x"%"#));
        assert_eq!(search.key.as_deref(), Some("a:b"));
        assert_eq!(search.seq, Some(17));
        assert!(!search.is_empty());
        assert!(parsed("   ").is_empty());
        assert_eq!(parsed("agg:order").aggregate_id, None);
    }

    #[test]
    fn a_word_without_a_name_is_an_id_or_searched_for_everywhere() {
        let id = "0198C0DE-0000-7000-8000-000000000001";
        assert_eq!(parsed(id).id, Some(id.to_lowercase()));
        assert_eq!(parsed("order:42 type:T").word.as_deref(), Some("order:42"));
        assert_eq!(parsed(r#""no route""#).word.as_deref(), Some("no route"));
        assert_eq!(parsed("correlation:req-7").correlation_id.as_deref(), Some("req-7"));
    }

    #[test]
    fn the_criteria_of_a_search_make_the_same_search() {
        let text = r#"type:T error:"no route \"x\"" key:a:b "two words""#;
        let criteria = criteria(text);
        assert_eq!(
            criteria,
            ["type:T", r#"error:"no route \"x\"""#, "key:a:b", r#""two words""#]
        );
        assert_eq!(parsed(&criteria.join(" ")), parsed(text));
    }

    #[test]
    fn an_unknown_name_is_found() {
        assert_eq!(unknown_name("type:T desination:audit").as_deref(), Some("desination"));
        assert_eq!(unknown_name("type:T HTTP:422 placed"), None);
    }

    #[test]
    fn a_link_finds_what_it_names() {
        for value in ["audit", "two words", "a\\b \"c\"", "back\\slash", "ü"] {
            assert_eq!(parsed(&word("destination", value)).destination.as_deref(), Some(value));
        }
    }

    #[test]
    fn the_search_for_an_error_group_keeps_its_words_and_leaves_its_numbers_open() {
        let found = parsed(&of_group("audit", r##"HTTP 409: {"order":#, "at":"50%"}"##));
        assert_eq!(found.destination.as_deref(), Some("audit"));
        assert_eq!(
            found.error_like.as_deref(),
            Some(r#"%HTTP 409: {"order":%, "at":"50\%"}%"#)
        );
        assert_eq!(parsed(&of_group("audit", "#")).error_like, None);
    }

    #[test]
    fn a_time_is_a_span_or_a_moment() {
        assert_eq!(parsed("since:15m").since, Some(When::SecondsAgo(900)));
        assert_eq!(parsed("since:3d").since, Some(When::SecondsAgo(259_200)));
        for moment in ["2026-01-31", "2026-01-31T12:00", "2026-01-31T12:00:05Z"] {
            assert_eq!(parsed(&format!("since:{moment}")).since, Some(When::At(moment.into())));
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_in_words() {
        for (text, said) in [
            ("order placed", "only one word"),
            ("id:42", "UUID"),
            ("type:", "has no value"),
            ("seq:1 seq:2", "twice"),
            ("seq:one", "not a seq"),
            ("partition:p1024", "not a partition"),
            ("since:yesterday", "not a time"),
            ("since:5y", "not a time"),
            ("since:99999999999999999999s", "not a time"),
            ("since:allballs", "not a time"),
            ("error:\"open", "not closed"),
            ("key:\0", "NUL"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
