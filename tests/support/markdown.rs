//! Reads pages of the docs, for tests that run their examples.

/// The fenced code blocks of a language, without their indentation. An empty language means blocks without one.
pub fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(found) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let indent = line.len() - line.trim_start().len();
        let inside = lines.by_ref().take_while(|line| line.trim() != "```");
        let block: Vec<&str> = inside.map(|line| line.get(indent..).unwrap_or_default()).collect();
        if found == language {
            blocks.push(block.join("\n"));
        }
    }
    blocks
}
