//! The search language of the messages: `type:OrderPlaced agg:order:42 partition:p07 destination:audit error:timeout
//! since:2h key:order:42 seq:17`, in any order, each word once. All of them must hold. Pure.

use outbox_core::partition::Partition;

/// What is looked for. Texts are compared as they are; `error` is contained in the error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Search {
    pub kind: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub key: Option<String>,
    pub partition: Option<Partition>,
    pub destination: Option<String>,
    pub error: Option<String>,
    pub since: Option<Since>,
    pub seq: Option<i64>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Since {
    /// So many seconds ago.
    Ago(i64),
    /// A moment, in a form that Postgres reads.
    At(String),
}

impl Since {
    /// As an SQL expression, with the text in place of `{}` as its parameter.
    pub fn parameter(&self) -> String {
        match self {
            Self::Ago(seconds) => format!("{seconds} s"),
            Self::At(moment) => moment.clone(),
        }
    }
}

pub const WORDS: [&str; 8] = [
    "type",
    "agg",
    "partition",
    "destination",
    "error",
    "since",
    "key",
    "seq",
];

impl Search {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut search = Self::default();
        for token in tokens(text)? {
            let known = token.split_once(':').filter(|(word, _)| WORDS.contains(word));
            let Some((word, value)) = known else {
                return Err(format!(
                    "\"{token}\" does not say what it is: put one of {} before it",
                    WORDS.map(|word| format!("{word}:")).join(" ")
                ));
            };
            if value.is_empty() {
                return Err(format!("nothing stands behind {word}:"));
            }
            if search.has(word) {
                return Err(format!("{word}: is given twice"));
            }
            search.set(word, value)?;
        }
        Ok(search)
    }

    fn has(&self, word: &str) -> bool {
        match word {
            "type" => self.kind.is_some(),
            "agg" => self.aggregate_type.is_some(),
            "key" => self.key.is_some(),
            "partition" => self.partition.is_some(),
            "destination" => self.destination.is_some(),
            "error" => self.error.is_some(),
            "since" => self.since.is_some(),
            _ => self.seq.is_some(),
        }
    }

    fn set(&mut self, word: &str, value: &str) -> Result<(), String> {
        let text = Some(value.to_owned());
        match word {
            "type" => self.kind = text,
            "agg" => {
                let (kind, id) = value
                    .split_once(':')
                    .map_or((value, None), |(kind, id)| (kind, Some(id)));
                self.aggregate_type = Some(kind.to_owned());
                self.aggregate_id = id.filter(|id| !id.is_empty()).map(str::to_owned);
            }
            "key" => self.key = text,
            "partition" => {
                let parsed = Partition::parse_label(value);
                self.partition = Some(parsed.map_err(|_| format!("{value} is no partition: write it as p07"))?);
            }
            "destination" => self.destination = text,
            "error" => self.error = text,
            "since" => self.since = Some(since(value)?),
            _ => {
                let seq = value
                    .parse()
                    .map_err(|_| format!("{value} is no seq, which is a number"))?;
                self.seq = Some(seq);
            }
        }
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the event must be looked at, not only the message.
    pub fn asks_event(&self) -> bool {
        self.kind.is_some() || self.aggregate_type.is_some()
    }
}

/// A word of the language for what may hold spaces and quotes.
pub fn word(name: &str, value: &str) -> String {
    let plain = !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c == '"');
    match plain {
        true => format!("{name}:{value}"),
        false => format!("{name}:\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"")),
    }
}

/// `15m`, `2h`, `3d`, `30s`, a day or a moment.
fn since(value: &str) -> Result<Since, String> {
    let bad = || format!("since:{value} is no time: write 30s, 15m, 2h, 3d, or 2026-01-31T12:00");
    let mut digits = value.char_indices().skip_while(|(_, c)| c.is_ascii_digit());
    if let Some((at, unit)) = digits.next()
        && at > 0
        && digits.next().is_none()
    {
        let number: i64 = value[..at].parse().map_err(|_| bad())?;
        let unit = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return Err(bad()),
        };
        return number
            .checked_mul(unit)
            .filter(|s| *s <= 36_500 * 86_400)
            .map(Since::Ago)
            .ok_or_else(bad);
    }
    // Only this form: what else Postgres takes for a time depends on settings, and some of it, such as "allballs", on humour.
    let shape: String = value
        .chars()
        .map(|c| if c.is_ascii_digit() { '9' } else { c })
        .collect();
    let moment = shape.strip_suffix('Z').unwrap_or(&shape);
    let shapes = ["9999-99-99", "9999-99-99T99:99", "9999-99-99T99:99:99"];
    if shapes.contains(&moment) {
        Ok(Since::At(value.to_owned()))
    } else {
        Err(bad())
    }
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

    fn parsed(text: &str) -> Search {
        Search::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_word_finds_its_place() {
        let search = parsed(
            r#"type:OrderPlaced  agg:order:4:2 partition:p07 destination:audit error:"no route \"x\"" key:a:b seq:17"#,
        );
        assert_eq!(search.kind.as_deref(), Some("OrderPlaced"));
        assert_eq!(search.aggregate_type.as_deref(), Some("order"));
        assert_eq!(search.aggregate_id.as_deref(), Some("4:2"));
        assert_eq!(search.partition.map(Partition::label).as_deref(), Some("p07"));
        assert_eq!(search.destination.as_deref(), Some("audit"));
        assert_eq!(search.error.as_deref(), Some(r#"no route "x""#));
        assert_eq!(search.key.as_deref(), Some("a:b"));
        assert_eq!(search.seq, Some(17));
        assert!(search.asks_event() && !search.is_empty());
        assert!(parsed("   ").is_empty());
        assert_eq!(parsed("agg:order").aggregate_id, None);
    }

    #[test]
    fn a_link_finds_what_it_names() {
        for value in ["audit", "two words", "a\\b \"c\"", "back\\slash", "ü"] {
            assert_eq!(parsed(&word("destination", value)).destination.as_deref(), Some(value));
        }
    }

    #[test]
    fn a_time_is_a_span_or_a_moment() {
        assert_eq!(parsed("since:15m").since, Some(Since::Ago(900)));
        assert_eq!(parsed("since:3d").since, Some(Since::Ago(259_200)));
        for moment in ["2026-01-31", "2026-01-31T12:00", "2026-01-31T12:00:05Z"] {
            assert_eq!(parsed(&format!("since:{moment}")).since, Some(Since::At(moment.into())));
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_in_words() {
        for (text, said) in [
            ("order", "does not say what it is"),
            ("colour:red", "does not say what it is"),
            ("type:", "nothing stands behind"),
            ("seq:1 seq:2", "twice"),
            ("seq:one", "no seq"),
            ("partition:7", "no partition"),
            ("since:yesterday", "no time"),
            ("since:5y", "no time"),
            ("since:99999999999999999999s", "no time"),
            ("since:allballs", "no time"),
            ("error:\"open", "not closed"),
            ("key:\0", "NUL"),
        ] {
            let error = Search::parse(text).expect_err(text);
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
