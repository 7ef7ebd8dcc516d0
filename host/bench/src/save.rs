//! Keeps a run's results: a line a request, and the summary.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use crate::error::BenchError;
use crate::record::Record;
use crate::summary::Summary;

/// Writes `requests.jsonl` and `summary.json` into a folder, which is made when it is not there. No prompt, no answer, no key is in them.
///
/// # Errors
/// The file that could not be written.
pub fn save(folder: &Path, summary: &Summary, records: &[Record]) -> Result<(), BenchError> {
    let fault = |path: &Path, cause| BenchError::Save { path: path.display().to_string(), cause };
    fs::create_dir_all(folder).map_err(|cause| fault(folder, cause))?;
    let lines = folder.join("requests.jsonl");
    write_lines(&lines, records).map_err(|cause| fault(&lines, cause))?;
    let path = folder.join("summary.json");
    let text = serde_json::to_string_pretty(summary).map_err(|cause| fault(&path, cause.into()))?;
    fs::write(&path, text + "\n").map_err(|cause| fault(&path, cause))
}

fn write_lines(path: &Path, records: &[Record]) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for record in records {
        serde_json::to_writer(&mut file, record)?;
        file.write_all(b"\n")?;
    }
    file.flush()
}
