//! How much memory may this process use, and who says so?
//!
//! The least of what binds counts: the setting, the limits of the control groups that the process is in, and the machine. What binds by itself
//! is taken whole; of a machine, which others use as well, it is a share of what is available at the start.

use std::fmt;
use std::fs;
use std::path::{Component, Path};

/// Share of the machine's available memory, in percent: the rest is for what others start later, and for the files that are read.
const AVAILABLE_PERCENT: u64 = 80;

/// Where no file says what the machine has.
const ASSUMED_BYTES: u64 = 4 << 30;

/// From here on a limit is none: what Linux writes where nothing is limited lies above.
const NO_LIMIT: u64 = 1 << 60;

/// What binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `replicas.memory_bytes`.
    Setting,
    /// A control group.
    ControlGroup,
    /// The limit on addresses (`ulimit -v`).
    Addresses,
    /// All that the machine has.
    Machine,
    /// A share of what the machine has available.
    Available,
    /// Nothing: the system does not tell.
    Assumed,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "replicas.memory_bytes",
            Self::ControlGroup => "the control group's limit",
            Self::Addresses => "the limit on addresses, ulimit -v",
            Self::Machine => "all that the machine has",
            Self::Available => return write!(f, "{AVAILABLE_PERCENT} % of what the machine has available"),
            Self::Assumed => "assumed, since the system does not tell",
        })
    }
}

/// How much, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// What binds.
    pub source: Source,
}

impl Limit {
    /// Somebody gave this memory to this process: it may be planned with to the end.
    pub fn is_own(&self) -> bool {
        matches!(self.source, Source::Setting | Source::ControlGroup)
    }
}

/// What the system tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct System {
    total_bytes: Option<u64>,
    available_bytes: Option<u64>,
    group_bytes: Option<u64>,
    address_bytes: Option<u64>,
}

/// The limit in force; `setting` is 0 for none.
pub fn find(setting: u64) -> Limit {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let system = System {
        total_bytes: kib_of(&meminfo, "MemTotal:"),
        available_bytes: kib_of(&meminfo, "MemAvailable:"),
        group_bytes: group_limit(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup")),
        address_bytes: address_limit(&read("/proc/self/limits")),
    };
    decide(setting, &system)
}

fn decide(setting: u64, system: &System) -> Limit {
    let whole = |bytes: Option<u64>, source| bytes.map(|bytes| Limit { bytes, source });
    let of_machine = if setting > 0 {
        whole(system.total_bytes, Source::Machine)
    } else {
        let share = system.available_bytes.map(|bytes| bytes / 100 * AVAILABLE_PERCENT);
        whole(share, Source::Available).or(Some(Limit { bytes: ASSUMED_BYTES, source: Source::Assumed }))
    };
    let all = [
        whole(Some(setting).filter(|&bytes| bytes > 0), Source::Setting),
        whole(system.group_bytes, Source::ControlGroup),
        whole(system.address_bytes, Source::Addresses),
        of_machine,
    ];
    // Of equal ones the first is named.
    all.into_iter()
        .flatten()
        .min_by_key(|limit| limit.bytes)
        .unwrap_or(Limit { bytes: ASSUMED_BYTES, source: Source::Assumed })
}

/// A line of `/proc/meminfo` in bytes.
fn kib_of(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The soft limit on addresses in `/proc/self/limits`.
fn address_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The least limit of the groups in `membership`, the text of `/proc/self/cgroup`, and of all groups above them. `root` is where the
/// hierarchies are mounted. Inside a container the group's own path is often not there; then the mount itself is the container's group.
fn group_limit(root: &Path, membership: &str) -> Option<u64> {
    let lines = membership.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    });
    let limits = lines.flat_map(|(controllers, group)| {
        let files: &[(&str, &str)] = if controllers.is_empty() {
            &[("", "memory.max"), ("", "memory.high"), ("unified", "memory.max"), ("unified", "memory.high")]
        } else if controllers.split(',').any(|name| name == "memory") {
            &[("memory", "memory.limit_in_bytes")]
        } else {
            &[]
        };
        files.iter().flat_map(move |(mount, file)| {
            let group = Path::new(group.trim_start_matches('/'));
            let is_below = group.components().all(|part| matches!(part, Component::Normal(_)));
            let mount = root.join(mount);
            let groups = if is_below { group } else { Path::new("") }.ancestors();
            groups.filter_map(move |group| limit_in(&mount.join(group).join(file))).collect::<Vec<_>>()
        })
    });
    limits.min()
}

/// A file with a number; `max` and the largest numbers are no limit.
fn limit_in(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok().filter(|&bytes| bytes < NO_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_least_of_what_binds_counts() {
        let of = |setting, system| {
            let Limit { bytes, source } = decide(setting, &system);
            (bytes, source)
        };
        let laptop = System { total_bytes: Some(8 * GIB), available_bytes: Some(500 << 20), ..System::default() };
        assert_eq!(of(0, laptop), (400 << 20, Source::Available));
        // Whoever names a number has thought of the others, and cannot have more than there is.
        assert_eq!(of(6 * GIB, laptop), (6 * GIB, Source::Setting));
        assert_eq!(of(9 * GIB, laptop), (8 * GIB, Source::Machine));
        let container = System { group_bytes: Some(GIB), ..System { available_bytes: Some(300 * GIB), ..laptop } };
        assert_eq!(of(0, container), (GIB, Source::ControlGroup));
        assert_eq!(of(2 * GIB, container), (GIB, Source::ControlGroup));
        assert_eq!(of(GIB / 2, container), (GIB / 2, Source::Setting));
        // A container's limit says nothing of what its machine has left.
        assert_eq!(of(0, System { group_bytes: Some(GIB), ..laptop }), (400 << 20, Source::Available));
        assert_eq!(of(0, System { address_bytes: Some(GIB), ..container }).0, GIB);
        assert_eq!(of(0, System { address_bytes: Some(GIB - 1), ..container }), (GIB - 1, Source::Addresses));
        assert_eq!(of(0, System::default()), (4 * GIB, Source::Assumed));
        assert_eq!(of(5 * GIB, System::default()), (5 * GIB, Source::Setting));
    }

    #[test]
    fn files_of_the_system_are_read() {
        let meminfo = "MemTotal:       24684092 kB\nMemFree:        14330292 kB\nMemAvailable:   21800944 kB\n";
        assert_eq!(kib_of(meminfo, "MemTotal:"), Some(25_276_510_208));
        assert_eq!(kib_of(meminfo, "MemAvailable:"), Some(22_324_166_656));
        assert_eq!(kib_of("MemTotal: many kB\n", "MemTotal:"), None);
        assert_eq!(kib_of("", "MemTotal:"), None);
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max cpu time              unlimited            unlimited            seconds   \n\
                      Max address space         16384000000          unlimited            bytes     \n";
        assert_eq!(address_limit(limits), Some(16_384_000_000));
        assert_eq!(address_limit(&limits.replace("16384000000", "unlimited  ")), None);
    }

    /// Folders as the kernel shows them: what each hierarchy, each depth and each kind of nothing says.
    #[test]
    fn the_tightest_group_above_the_process_binds() {
        let root = &std::env::temp_dir().join(format!("penstock-groups-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(group_limit(root, "0::/user.slice/app\n"), None);
        // Version 2: the own group has none, the one above has, the root's file is not there.
        write("user.slice/app/memory.max", "max\n");
        write("user.slice/app/memory.high", "max\n");
        write("user.slice/memory.max", "2147483648\n");
        assert_eq!(group_limit(root, "0::/user.slice/app\n"), Some(2 * GIB));
        write("user.slice/app/memory.high", "1073741824\n");
        assert_eq!(group_limit(root, "0::/user.slice/app\n"), Some(GIB));
        assert_eq!(group_limit(root, "0::/elsewhere\n"), None);
        // A container sees its own group at the root, by whatever path the host knows it.
        write("memory.max", "536870912\n");
        assert_eq!(group_limit(root, "0::/\n"), Some(GIB / 2));
        assert_eq!(group_limit(root, "0::/../host/path\n"), Some(GIB / 2));
        // Version 1, among other hierarchies.
        let first = "5:devices:/a\n4:cpu,memory:/job/7\n";
        assert_eq!(group_limit(root, first), None);
        write("memory/job/7/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(group_limit(root, first), None);
        write("memory/job/memory.limit_in_bytes", "805306368\n");
        assert_eq!(group_limit(root, first), Some(768 << 20));
        write("unified/job/memory.max", "268435456\n");
        assert_eq!(group_limit(root, "0::/job\n"), Some(GIB / 4));
        assert_eq!(group_limit(root, "rubbish\n\n:\n"), None);
        fs::remove_dir_all(root).unwrap();
    }
}
