//! The sweep as a picture: a square for each cell, green where roles apart win, red where unified does.

use std::fmt::Write as _;

use crate::Row;

const CELL: (usize, usize) = (120, 30);
const LEFT: usize = 190;

/// One panel a machine.
pub fn draw(panels: &[(&str, [&str; 3], Vec<Row>)]) -> String {
    let height: usize = panels.iter().map(|(_, _, rows)| 90 + rows.len() * CELL.1).sum();
    let width = LEFT + 4 * CELL.0 + 20;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut top = 0;
    for (name, links, rows) in panels {
        text(&mut svg, (10, top + 24), "start", name);
        text(&mut svg, (10, top + 48), "start", "prompt, load");
        for (column, head) in ["unified"].iter().chain(links).enumerate() {
            text(&mut svg, (LEFT + column * CELL.0 + CELL.0 / 2, top + 48), "middle", head);
        }
        for (line, (prompt, load, unified, by_link)) in rows.iter().enumerate() {
            let y = top + 58 + line * CELL.1;
            text(&mut svg, (10, y + 20), "start", &format!("{prompt} tokens, {load} %"));
            cell(&mut svg, (LEFT, y), "#eeeeee", &format!("{:.0} %", unified.in_time));
            for (column, (outcome, split)) in by_link.iter().enumerate() {
                let place = (LEFT + (column + 1) * CELL.0, y);
                cell(
                    &mut svg,
                    place,
                    &colour(outcome.in_time - unified.in_time),
                    &format!("{:.0} % ({split})", outcome.in_time),
                );
            }
        }
        top += 90 + rows.len() * CELL.1;
    }
    svg.push_str("</svg>\n");
    svg
}

/// White where both are alike, full at a difference of half of all requests.
fn colour(difference: f64) -> String {
    let faded = 255 - (difference.abs().min(50.0) * 3.4) as u8;
    if difference >= 0.0 { format!("#{faded:02x}e6{faded:02x}") } else { format!("#f0{faded:02x}{faded:02x}") }
}

fn cell(svg: &mut String, (x, y): (usize, usize), fill: &str, label: &str) {
    let (width, height) = (CELL.0 - 4, CELL.1 - 4);
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\" stroke=\"#999999\"/>"
    );
    text(svg, (x + width / 2, y + 17), "middle", label);
}

fn text(svg: &mut String, (x, y): (usize, usize), anchor: &str, label: &str) {
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>");
}
