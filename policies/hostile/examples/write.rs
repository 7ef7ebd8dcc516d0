//! Writes every hostile guest into a folder, for use by hand: `cargo run --example write -- FOLDER`.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).context("usage: write FOLDER")?);
    std::fs::create_dir_all(&folder)?;
    for decision in penstock_hostile_guests::DECISIONS {
        // What the others are changes of: something that they could take over from.
        std::fs::write(
            folder.join(format!("{decision}-keeps-every-rule.wasm")),
            penstock_hostile_guests::harmless(decision)?,
        )?;
        let at_once = penstock_hostile_guests::list(decision)?.into_iter().map(|hostile| ("", hostile));
        let late = penstock_hostile_guests::late(decision)?.into_iter().map(|hostile| ("late-", hostile));
        for (when, hostile) in at_once.chain(late) {
            let path = folder.join(format!("{decision}-{when}{}.wasm", hostile.name));
            std::fs::write(&path, &hostile.bytes)?;
            println!("{:?} {}", hostile.caught, path.display());
        }
    }
    Ok(())
}
