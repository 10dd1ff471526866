//! Which frames nest too deeply for lapin's parser. Pure; called by `guard` with each piece of a payload.
//!
//! It reads as lapin does (amq-protocol-types): a table is its length and pairs of a name and a value, an array its
//! length and values, and a value its type and its content. All other content is skipped, whatever bytes it holds.
//! There is no recursion, and the memory does not grow with the input. What lapin would refuse, it may refuse too.

/// The most tables and arrays within each other. `connection.start` nests two levels deep. Headers of a returned
/// message are those that were published, which do not nest.
pub(super) const LEVELS_MAX: usize = 64;

const DEEP: &str = "the peer sent a frame with deeply nested fields";
const MALFORMED: &str = "the peer sent a malformed table";

const CONNECTION_START: u32 = method(10, 10);
/// The methods with a table that only a client sends: start-ok, consume; of exchanges and queues, declare, bind and
/// unbind.
const OF_CLIENTS: [u32; 8] = [
    method(10, 11),
    method(60, 20),
    method(40, 10),
    method(40, 30),
    method(40, 40),
    method(50, 10),
    method(50, 20),
    method(50, 50),
];

const fn method(class: u16, method: u16) -> u32 {
    (class as u32) << 16 | method as u32
}

/// What the next number of a payload is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    /// Class and method.
    Method,
    /// Which properties a message has.
    Flags,
    /// The length of a short property before the headers. This number of others follows.
    Property(u32),
    /// The length of the name of a value.
    Name,
    /// The type of a value.
    Type,
    /// The length of a text or of bytes.
    Text,
    /// The length of a table or an array.
    Level { is_table: bool },
    /// None: nothing that follows nests.
    Rest,
}

impl Part {
    fn bytes(self) -> u32 {
        match self {
            Self::Method | Self::Text | Self::Level { .. } => 4,
            Self::Flags => 2,
            Self::Property(_) | Self::Name | Self::Type | Self::Rest => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct OpenLevel {
    /// Where in the payload it ends.
    end: u64,
    is_table: bool,
}

/// The place in a payload, and the tables and arrays around it.
#[derive(Debug)]
pub(super) struct Nesting {
    part: Part,
    /// The bytes of the part that have been read, as a number.
    number: u32,
    digits: u32,
    /// The bytes to be skipped before the part.
    skip: u64,
    /// Where the part begins, once they are skipped.
    at: u64,
    levels: [OpenLevel; LEVELS_MAX],
    depth: usize,
}

impl Default for Nesting {
    fn default() -> Self {
        Self {
            part: Part::Rest,
            number: 0,
            digits: 0,
            skip: 0,
            at: 0,
            levels: [OpenLevel::default(); LEVELS_MAX],
            depth: 0,
        }
    }
}

impl Nesting {
    pub(super) fn begin_method(&mut self) {
        self.begin(0, Part::Method);
    }

    /// Begins the header of a message: class, weight and size come before the flags.
    pub(super) fn begin_content_header(&mut self) {
        self.begin(12, Part::Flags);
    }

    pub(super) fn begin_other(&mut self) {
        self.begin(0, Part::Rest);
    }

    fn begin(&mut self, skip: u64, part: Part) {
        (self.part, self.number, self.digits) = (part, 0, 0);
        (self.skip, self.at, self.depth) = (skip, skip, 0);
    }

    /// Reads the next piece of the payload. `Err` says why lapin must not see it.
    pub(super) fn accept(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        while self.part != Part::Rest && !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len() as u64);
                self.skip -= skipped;
                bytes = &bytes[skipped as usize..];
                continue;
            }
            self.number = self.number << 8 | u32::from(bytes[0]);
            self.digits += 1;
            bytes = &bytes[1..];
            if self.digits == self.part.bytes() {
                self.at += u64::from(self.digits);
                let number = std::mem::take(&mut self.number);
                self.digits = 0;
                self.read(number)?;
            }
        }
        Ok(())
    }

    /// Decides what comes after the part, which is this number.
    fn read(&mut self, number: u32) -> Result<(), &'static str> {
        match self.part {
            Part::Method if number == CONNECTION_START => self.go_on(2, Part::Level { is_table: true }), // the version
            Part::Method if OF_CLIENTS.contains(&number) => Err("the peer sent a method that only clients send"),
            Part::Method => self.go_on(0, Part::Rest),
            Part::Flags if number & 1 << 13 == 0 => self.go_on(0, Part::Rest),
            Part::Flags => self.go_on(0, before_headers((number >> 14).count_ones())),
            Part::Property(more) => self.go_on(number, before_headers(more)),
            Part::Name => self.go_on(number, Part::Type),
            Part::Type => match number as u8 {
                b'V' => self.end_value(0),
                b't' | b'b' | b'B' => self.end_value(1),
                b's' | b'U' | b'u' => self.end_value(2),
                b'I' | b'i' | b'f' => self.end_value(4),
                b'D' => self.end_value(5),
                b'L' | b'l' | b'd' | b'T' => self.end_value(8),
                b'S' | b'x' => self.go_on(0, Part::Text),
                b'A' => self.go_on(0, Part::Level { is_table: false }),
                b'F' => self.go_on(0, Part::Level { is_table: true }),
                _ => Err(MALFORMED),
            },
            Part::Text => self.end_value(number),
            Part::Level { is_table } => {
                let end = self.at + u64::from(number);
                if self.depth > 0 && end > self.levels[self.depth - 1].end {
                    return Err(MALFORMED);
                }
                *self.levels.get_mut(self.depth).ok_or(DEEP)? = OpenLevel { end, is_table };
                self.depth += 1;
                self.end_value(0)
            }
            Part::Rest => Ok(()),
        }
    }

    /// Continues with `part` behind this number of bytes.
    fn go_on(&mut self, skip: u32, part: Part) -> Result<(), &'static str> {
        (self.skip, self.part) = (u64::from(skip), part);
        self.at += self.skip;
        // A part outside of its level belongs to another field for lapin, or to none.
        let is_inside = |level: &OpenLevel| self.at + u64::from(part.bytes()) <= level.end;
        match part == Part::Rest || self.levels[..self.depth].last().is_none_or(is_inside) {
            true => Ok(()),
            false => Err(MALFORMED),
        }
    }

    /// Continues with what follows a value that has this number of bytes left, or the begin of a table or an array.
    fn end_value(&mut self, bytes: u32) -> Result<(), &'static str> {
        let end = self.at + u64::from(bytes);
        while let Some(level) = self.levels[..self.depth].last()
            && level.end == end
        {
            self.depth -= 1;
        }
        let part = match self.levels[..self.depth].last() {
            None => Part::Rest,
            Some(OpenLevel { is_table: true, .. }) => Part::Name,
            Some(OpenLevel { is_table: false, .. }) => Part::Type,
        };
        self.go_on(bytes, part)
    }
}

/// The part at this number of short properties before the headers.
fn before_headers(properties: u32) -> Part {
    match properties {
        0 => Part::Level { is_table: true },
        count => Part::Property(count - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::protocol::parse_class;
    use lapin::types::AMQPValue;
    use lapin::types::parsing::parse_field_table;
    use proptest::prelude::*;

    /// A value as the wire has it, but for its length.
    #[derive(Clone, Debug)]
    enum Value {
        /// A type, and content that does not nest.
        Plain(u8, Vec<u8>),
        Text(u8, Vec<u8>),
        Array(Vec<Value>),
        Table(Vec<(String, Value)>),
    }

    fn long(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
    }

    fn encoded(value: &Value) -> Vec<u8> {
        let (tag, content) = match value {
            Value::Plain(tag, content) => (*tag, content.clone()),
            Value::Text(tag, text) => (*tag, long(text)),
            Value::Array(values) => (b'A', long(&values.iter().flat_map(encoded).collect::<Vec<_>>())),
            Value::Table(pairs) => (b'F', table(pairs)),
        };
        [&[tag], &content[..]].concat()
    }

    fn table(pairs: &[(String, Value)]) -> Vec<u8> {
        let pair = |(name, value): &(String, Value)| [&[name.len() as u8], name.as_bytes(), &encoded(value)].concat();
        long(&pairs.iter().flat_map(pair).collect::<Vec<_>>())
    }

    /// The header of a message with a content type, this table, and a priority.
    fn header(table: &[u8]) -> Vec<u8> {
        [&[0, 60, 0, 0][..], &[0; 8], &[0xa8, 0, 3], b"a/b", table, &[9]].concat()
    }

    fn start(table: &[u8]) -> Vec<u8> {
        [&[0, 10, 0, 10, 0, 9][..], table, &long(b"PLAIN"), &long(b"en_US")].concat()
    }

    fn verdict(begin: fn(&mut Nesting), payload: &[u8], chunk_bytes: usize) -> Result<(), &'static str> {
        let mut nesting = Nesting::default();
        begin(&mut nesting);
        payload.chunks(chunk_bytes).try_for_each(|chunk| nesting.accept(chunk))
    }

    /// The verdict on a table in both places where a broker sends one.
    fn verdict_of(table: &[u8], chunk_bytes: usize) -> Result<(), &'static str> {
        let in_method = verdict(Nesting::begin_method, &start(table), chunk_bytes);
        assert_eq!(
            verdict(Nesting::begin_content_header, &header(table), chunk_bytes),
            in_method
        );
        in_method
    }

    /// How deep lapin goes into a value: 0 if it is no table and no array.
    fn depth(value: &AMQPValue) -> usize {
        let deepest = |depths: &mut dyn Iterator<Item = usize>| 1 + depths.max().unwrap_or(0);
        match value {
            AMQPValue::FieldArray(array) => deepest(&mut array.as_slice().iter().map(depth)),
            AMQPValue::FieldTable(table) => deepest(&mut table.inner().values().map(depth)),
            _ => 0,
        }
    }

    fn depth_of(table: &[u8]) -> Option<usize> {
        let (_, table) = parse_field_table(table).ok()?;
        Some(depth(&AMQPValue::FieldTable(table)))
    }

    /// Values of each type. Their bytes often look like the begin of an array or a table.
    fn plain() -> impl Strategy<Value = Value> {
        let byte = prop_oneof![Just(b'A'), Just(b'F'), Just(0), any::<u8>()];
        let bytes = |count| prop::collection::vec(byte.clone(), count);
        let widths = [
            (b'V', 0),
            (b't', 1),
            (b'b', 1),
            (b'B', 1),
            (b's', 2),
            (b'U', 2),
            (b'u', 2),
            (b'I', 4),
            (b'i', 4),
            (b'f', 4),
            (b'D', 5),
            (b'L', 8),
            (b'l', 8),
            (b'd', 8),
            (b'T', 8),
        ];
        let numbers = (prop::sample::select(widths.to_vec()), bytes(8)).prop_map(|((tag, width), mut content)| {
            content.truncate(width);
            Value::Plain(tag, content)
        });
        let texts = (
            prop::sample::select(vec![b'S', b'x']),
            prop::collection::vec(byte.clone(), 0..40),
        )
            .prop_map(|(tag, text)| Value::Text(tag, text));
        prop_oneof![numbers, texts]
    }

    fn pairs(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Vec<(String, Value)>> {
        prop::collection::vec(("[A-F\0]{0,6}", value), 0..6)
    }

    fn any_table() -> impl Strategy<Value = Vec<(String, Value)>> {
        let value = plain().prop_recursive(5, 60, 6, |inner| {
            let array = prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array);
            prop_oneof![array, pairs(inner).prop_map(Value::Table)]
        });
        pairs(value)
    }

    /// A table with the given one inside of this number of others, each with something before and behind it.
    fn wrapped(inner: Vec<(String, Value)>, levels: usize, beside: &Value) -> Vec<(String, Value)> {
        (0..levels).fold(inner, |inner, level| {
            let beside = || ("x".to_owned(), beside.clone());
            let inner = match level % 2 {
                0 => Value::Table(inner),
                _ => Value::Array(vec![Value::Table(inner)]),
            };
            vec![beside(), ("y".to_owned(), inner), beside()]
        })
    }

    #[test]
    fn the_limit_is_exact_and_other_values_do_not_count() {
        let integers = vec![("n".to_owned(), Value::Plain(b'l', vec![0, 0, 0, 0, 0, b'A', 0, 0])); 1_000];
        for levels in 0..=LEVELS_MAX {
            let table = table(&wrapped(integers.clone(), levels, &integers[0].1));
            let depth = depth_of(&table).expect("a table for lapin");
            for chunk_bytes in [1, 7, usize::MAX] {
                assert_eq!(verdict_of(&table, chunk_bytes).is_ok(), depth <= LEVELS_MAX, "{depth}");
            }
        }
    }

    #[test]
    fn every_method_with_a_table_is_known() {
        let deep = table(&wrapped(Vec::new(), LEVELS_MAX, &Value::Plain(b'V', Vec::new())));
        let mut refused = 0;
        for (class, method) in (0..=120_u8).flat_map(|class| (0..=120_u8).map(move |method| (class, method))) {
            for before in 0..12 {
                for behind in [0, 8] {
                    let payload = [&[0, class, 0, method][..], &vec![0; before], &deep, &vec![0; behind]].concat();
                    let is_read = matches!(parse_class(&payload[..]), Ok((_, read)) if format!("{read:?}").contains("FieldArray"));
                    let is_refused = verdict(Nesting::begin_method, &payload, usize::MAX).is_err();
                    assert!(is_refused || !is_read, "{class} {method} {before} {behind}");
                    refused += usize::from(is_read);
                }
            }
        }
        assert!(refused > OF_CLIENTS.len(), "lapin reads the table of {refused}");
    }

    proptest! {
        #[test]
        fn every_well_formed_table_passes_in_any_chunks(pairs in any_table(), chunk_bytes in 1usize..50) {
            let table = table(&pairs);
            prop_assert!(depth_of(&table).is_some());
            prop_assert_eq!(verdict_of(&table, chunk_bytes), Ok(()));
        }

        #[test]
        fn no_deep_table_passes(pairs in any_table(), beside in plain(), levels in LEVELS_MAX..100, chunk_bytes in 1usize..50) {
            let table = table(&wrapped(pairs, levels, &beside));
            prop_assert!(depth_of(&table).is_some_and(|depth| depth > LEVELS_MAX));
            prop_assert_eq!(verdict_of(&table, chunk_bytes), Err(DEEP));
        }

        #[test]
        fn what_passes_is_not_deep_for_lapin(
            pairs in any_table(),
            beside in plain(),
            levels in 0usize..80,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut table = table(&wrapped(pairs, levels, &beside));
            for (at, byte) in changes {
                let at = at.index(table.len());
                table[at] = byte;
            }
            let depth = depth_of(&table);
            match verdict(Nesting::begin_content_header, &header(&table), usize::MAX) {
                Ok(()) => prop_assert!(depth.is_none_or(|depth| depth <= LEVELS_MAX)),
                Err(DEEP) => {} // a change can make lapin drop the deep value for another one of its name
                Err(why) => prop_assert_eq!(depth, None, "{}", why),
            }
        }
    }
}
