//! Licences of everything that is built in, against the list in deny.toml. Works offline and needs no tool.

use std::path::Path;

use anyhow::{Context as _, Result};
use cargo_metadata::Metadata;
use serde::Deserialize;

#[derive(Deserialize)]
struct Deny {
    licenses: Licences,
}

#[derive(Deserialize)]
struct Licences {
    allow: Vec<String>,
}

pub fn check(root: &Path, metadata: &Metadata) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root.join("deny.toml")).context("read deny.toml")?;
    let allowed = toml::from_str::<Deny>(&text).context("parse deny.toml")?.licenses.allow;
    let faults = metadata.packages.iter().filter_map(|package| match &package.license {
        Some(expression) if satisfies(expression, &allowed) => None,
        Some(expression) => {
            Some(format!("{} {}: licence {expression} is not allowed by deny.toml", package.name, package.version))
        }
        None => Some(format!("{} {} names no licence", package.name, package.version)),
    });
    Ok(faults.collect())
}

/// Evaluates an SPDX expression of `OR`, `AND`, `/` and parentheses: each leaf is true when it is on the list.
fn satisfies(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let holds = any_of(&tokens, &mut at, allowed);
    holds && at == tokens.len()
}

fn any_of(tokens: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut holds = all_of(tokens, at, allowed);
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        holds |= all_of(tokens, at, allowed);
    }
    holds
}

fn all_of(tokens: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut holds = leaf(tokens, at, allowed);
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= leaf(tokens, at, allowed);
    }
    holds
}

fn leaf(tokens: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let Some(token) = tokens.get(*at) else { return false };
    *at += 1;
    if *token == "(" {
        let holds = any_of(tokens, at, allowed);
        let is_closed = tokens.get(*at) == Some(&")");
        *at += 1;
        return holds && is_closed;
    }
    let mut name = (*token).to_owned();
    if tokens.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", tokens.get(*at + 1).unwrap_or(&""));
        *at += 2;
    }
    allowed.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_evaluated() {
        let allowed = ["MIT".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned(), "Unicode-3.0".to_owned()];
        assert!(satisfies("MIT OR GPL-3.0", &allowed));
        assert!(satisfies("(GPL-3.0 OR MIT) AND Unicode-3.0", &allowed));
        assert!(satisfies("Apache-2.0 WITH LLVM-exception", &allowed));
        assert!(satisfies("GPL-2.0/MIT", &allowed));
        assert!(!satisfies("MIT AND GPL-3.0", &allowed));
        assert!(!satisfies("(MIT", &allowed));
    }
}
