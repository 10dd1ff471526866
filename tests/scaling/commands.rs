//! Runs the commands that a page of docs/scaling shows for a broker.

use support::PrivateBroker;

/// Runs each line on the host of the broker. The first word is a program of RabbitMQ; a word in quotes may have spaces.
pub fn run(broker: &PrivateBroker, commands: &str) {
    for command in commands.lines() {
        let parts = command.split('\'').enumerate();
        let words: Vec<&str> = parts
            .flat_map(|(number, part)| match number % 2 {
                1 => vec![part],
                _ => part.split_whitespace().collect(),
            })
            .collect();
        broker.run(words[0], &words[1..]);
    }
}
