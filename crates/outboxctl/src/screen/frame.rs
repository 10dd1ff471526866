//! A frame as text, for a file or a test.

use super::text::width;
use ratatui::buffer::Buffer;

/// The characters of a frame, without trailing blanks.
pub fn as_text(buffer: &Buffer) -> String {
    let columns = usize::from(buffer.area.width.max(1));
    let rows = buffer.content.chunks(columns).map(|row| {
        let mut text = String::new();
        let mut covered = 0; // cells that a wide character before them occupies
        for cell in row {
            if covered == 0 {
                text.push_str(cell.symbol());
                covered = width(cell.symbol()).saturating_sub(1);
            } else {
                covered -= 1;
            }
        }
        text.trim_end().to_owned()
    });
    rows.collect::<Vec<_>>().join("\n").trim_end().to_owned()
}
