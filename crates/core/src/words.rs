//! Closed lists of words in rows, statements and commands. An enum made by [`words!`](crate::words!) has each of them
//! once, next to its variant.

/// One of a closed list of words.
pub trait Word: Copy + PartialEq + 'static {
    /// All of them.
    const ALL: &'static [Self];

    fn name(self) -> &'static str;

    fn of_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|word| word.name() == name)
    }
}

/// Declares an enum, and implements [`Word`](crate::words::Word) for it.
#[macro_export]
macro_rules! words {
    ($(#[$of_all:meta])* $vis:vis enum $name:ident { $($(#[$of_one:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$of_all])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $name {
            $($(#[$of_one])* $variant,)+
        }

        impl $crate::words::Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    words! {
        enum Colour {
            Red = "red",
            DarkBlue = "dark blue",
        }
    }

    #[test]
    fn a_word_comes_back_from_its_name() {
        assert_eq!(
            Colour::ALL.iter().map(|c| c.name()).collect::<Vec<_>>(),
            ["red", "dark blue"]
        );
        for colour in Colour::ALL {
            assert_eq!(Colour::of_name(colour.name()), Some(*colour));
        }
        assert_eq!(["", "Red", "blue"].map(Colour::of_name), [None; 3]);
    }
}
