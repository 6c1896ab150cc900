//! How much memory the machine (or the container) has.

/// Bytes; `None` where the system does not tell.
pub(super) fn machine_bytes() -> Option<u64> {
    physical_bytes().map(|bytes| group_limit().map_or(bytes, |limit| limit.min(bytes)))
}

/// The smallest limit of this process's control group and those above it: a container's, or
/// systemd's `MemoryMax`.
fn group_limit() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    std::path::Path::new(path)
        .ancestors()
        .filter_map(|group| {
            let file = std::path::Path::new("/sys/fs/cgroup").join(group).join("memory.max");
            std::fs::read_to_string(file).ok()?.trim().parse().ok()
        })
        .min()
}

#[cfg(not(target_os = "macos"))]
fn physical_bytes() -> Option<u64> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// `MemTotal:       24567890 kB`.
#[cfg(not(target_os = "macos"))]
fn parse_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(target_os = "macos")]
fn physical_bytes() -> Option<u64> {
    let answer = std::process::Command::new("/usr/sbin/sysctl").args(["-n", "hw.memsize"]).output().ok()?;
    String::from_utf8(answer.stdout).ok()?.trim().parse().ok()
}

#[cfg(all(test, not(target_os = "macos")))]
mod tests {
    use super::*;

    #[test]
    fn reads_the_total_and_nothing_else() {
        assert_eq!(parse_meminfo("MemFree: 1 kB\nMemTotal:       2048 kB\n"), Some(2 * 1024 * 1024));
        assert_eq!(parse_meminfo("MemFree: 1 kB\n"), None);
        assert_eq!(parse_meminfo("MemTotal: many kB\n"), None);
    }
}
