//! What a deployment remembers between starts: a secret that keys tenant ids, and the number of the last gateway start.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use penstock_base::GatewayEpoch;

use crate::config::{Config, StateDir};

/// Bytes of the secret that are used.
pub const SECRET_BYTES: usize = 32;

/// Reads the secret, or makes one at the default place.
///
/// # Errors
/// A named file that is not there or is too short; a default place that cannot be written.
pub fn secret(named: Option<&Path>) -> Result<[u8; SECRET_BYTES]> {
    if let Some(path) = named {
        return read(path);
    }
    let path = default_file("deployment-secret").context("no home directory: set server.secret_file")?;
    if path.exists() { read(&path) } else { make(&path) }
}

/// The next start's number: ids minted by this process differ from those of every earlier one on this machine.
///
/// # Errors
/// The counter file cannot be read, locked or written.
fn next_epoch() -> Result<GatewayEpoch> {
    let path = default_file("gateway-epoch").context("no home directory: set PENSTOCK_CACHE")?;
    count_up(&path).with_context(|| format!("count up the gateway epoch in {}", path.display()))
}

/// A folder of this name beside what is kept between starts.
pub fn default_dir(name: &str) -> Option<PathBuf> {
    default_file(name)
}

/// Where what decides is kept over a restart. Unless told, a server is the same again when it listens on the same address; one that takes any
/// free port is none that could come back.
pub fn state_dir(config: &Config) -> Option<PathBuf> {
    let listen = config.server.listen;
    match &config.policy.state_dir {
        StateDir::At(path) => Some(path.clone()),
        StateDir::Off => None,
        StateDir::Auto if listen.port() == 0 => None,
        StateDir::Auto => {
            let name = listen.to_string().replace(['[', ']'], "").replace(':', "-");
            default_dir("state").map(|dir| dir.join(name))
        }
    }
}

/// [`next_epoch`], or where nothing can be written a number drawn at random, which an earlier start may have had.
pub fn next_epoch_or_any() -> GatewayEpoch {
    next_epoch().unwrap_or_else(|fault| {
        tracing::warn!(fault = format!("{fault:#}"), "starts cannot be counted: this one draws its number");
        GatewayEpoch((crate::tenants::entropy() as u16).max(1))
    })
}

fn default_file(name: &str) -> Option<PathBuf> {
    penstock_model::cache_dir::models_dir().and_then(|dir| Some(dir.parent()?.join(name)))
}

fn count_up(path: &Path) -> Result<GatewayEpoch> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    // Two servers that start at once take turns.
    file.lock()?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    // After 65,535 starts the numbers come again; 0 is never one.
    let next = text.trim().parse::<u16>().unwrap_or(0).checked_add(1).unwrap_or(1);
    file.rewind()?;
    file.set_len(0)?;
    writeln!(file, "{next}")?;
    Ok(GatewayEpoch(next))
}

fn read(path: &Path) -> Result<[u8; SECRET_BYTES]> {
    let bytes = std::fs::read(path).with_context(|| format!("read the deployment secret {}", path.display()))?;
    ensure!(
        bytes.len() >= SECRET_BYTES,
        "the deployment secret {} has {} bytes, at least {SECRET_BYTES} are needed: head -c 32 /dev/urandom > FILE",
        path.display(),
        bytes.len()
    );
    let mut secret = [0; SECRET_BYTES];
    secret.copy_from_slice(&bytes[..SECRET_BYTES]);
    Ok(secret)
}

fn make(path: &Path) -> Result<[u8; SECRET_BYTES]> {
    let mut secret = [0; SECRET_BYTES];
    let mut source = File::open("/dev/urandom").context("open /dev/urandom; or set server.secret_file")?;
    source.read_exact(&mut secret).context("read /dev/urandom")?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    // Written aside and linked into place: whoever sees the file sees all of it, and the first of two writers wins.
    let aside = path.with_extension(format!("{}", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&aside).with_context(|| format!("create {}", aside.display()))?;
    file.write_all(&secret).with_context(|| format!("write {}", aside.display()))?;
    let linked = std::fs::hard_link(&aside, path);
    std::fs::remove_file(&aside).with_context(|| format!("remove {}", aside.display()))?;
    match linked {
        Ok(()) => Ok(secret),
        Err(fault) if fault.kind() == std::io::ErrorKind::AlreadyExists => read(path),
        Err(fault) => Err(fault).with_context(|| format!("create {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_count_up_and_skip_zero() {
        let dir = std::env::temp_dir().join(format!("penstock-epoch-{}", std::process::id()));
        let path = dir.join("gateway-epoch");
        assert_eq!((count_up(&path).unwrap(), count_up(&path).unwrap()), (GatewayEpoch(1), GatewayEpoch(2)));
        std::fs::write(&path, "65535\n").unwrap();
        assert_eq!(count_up(&path).unwrap(), GatewayEpoch(1));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_secret_is_made_once_and_only_for_its_owner() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = std::env::temp_dir().join(format!("penstock-secret-{}", std::process::id()));
        let path = dir.join("deployment-secret");
        let secret = make(&path).unwrap();
        assert_eq!((make(&path).unwrap(), read(&path).unwrap()), (secret, secret));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
