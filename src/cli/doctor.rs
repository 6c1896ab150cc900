//! `greenroom doctor`: what this machine can do, what is wrong, how to mend it.

use std::fmt::Write;

use greenroom::config::{Config, DeviceChoice};
use greenroom::http::Listeners;

use super::{Build, DoctorArgs, Stop, home, models, settings, terminal};
use crate::exit::Exit;

/// Lines of the report, and how many of them name something wrong.
#[derive(Default)]
struct Report {
    text: String,
    wrong: usize,
}

impl Report {
    fn fact(&mut self, name: &str, value: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "ok     {name:<10} {value}");
    }

    fn wrong(&mut self, name: &str, value: &str, cure: &str) {
        self.wrong += 1;
        let _ = writeln!(self.text, "WRONG  {name:<10} {value}\n       {:<10} → {cure}", "");
    }
}

/// Prints the report; the exit code says whether anything is wrong.
pub(super) fn doctor(build: Build, args: &DoctorArgs) -> Result<Exit, Stop> {
    let mut report = Report::default();
    report.fact("version", &version(build));
    let config = match settings::plain(args.settings.config.as_deref()) {
        Ok(config) => {
            report.fact("settings", "as they should be");
            config
        }
        Err(stop) => {
            report.wrong(
                "settings",
                &stop.message,
                "mend the lines named; config/greenroom.toml shows every setting",
            );
            Config::default()
        }
    };
    device(&mut report, build, config.engine.device);
    // The library is linked: that this runs at all says that it was found.
    #[cfg(feature = "mlx")]
    report.fact("mlx", &format!("library version {}", greenroom::model::mlx::version()));
    machine(&mut report, &config);
    models_here(&mut report);
    port(&mut report, &config);
    let end = match report.wrong {
        0 => "Nothing is wrong.\n".to_owned(),
        1 => "One thing is wrong.\n".to_owned(),
        n => format!("{n} things are wrong.\n"),
    };
    // Nobody reading is no failure.
    let _ = terminal::say(&(report.text + &end));
    Ok(if report.wrong == 0 { Exit::Ok } else { Exit::Failure })
}

fn version(build: Build) -> String {
    let features: Vec<&str> = [("cpu", build.cpu), ("mlx", build.mlx), ("fake", build.fake)]
        .iter()
        .filter(|(_, on)| *on)
        .map(|(n, _)| *n)
        .collect();
    format!(
        "greenroom {} for {} {}, with {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
        if features.is_empty() { "no device".to_owned() } else { features.join(", ") }
    )
}

fn device(report: &mut Report, build: Build, choice: DeviceChoice) {
    let mac = std::env::consts::OS == "macos";
    let rebuild = "build with the Cargo features cpu and mlx (the default)";
    match choice {
        DeviceChoice::Mlx if !build.mlx => report.wrong("device", "mlx is set, but not compiled in", rebuild),
        DeviceChoice::Cpu if !build.cpu => report.wrong("device", "cpu is set, but not compiled in", rebuild),
        DeviceChoice::Auto if !build.mlx && !build.cpu => report.wrong("device", "none compiled in", rebuild),
        DeviceChoice::Auto if build.mlx && mac => report.fact("device", "Metal, through MLX"),
        DeviceChoice::Mlx if mac => report.fact("device", "Metal, through MLX"),
        DeviceChoice::Mlx => report.fact("device", "MLX's CPU device (slow; --device cpu is the fast one)"),
        DeviceChoice::Auto if !build.cpu => report.fact("device", "MLX's CPU device (slow)"),
        DeviceChoice::Auto | DeviceChoice::Cpu => report.fact("device", "our own CPU backend"),
    }
}

fn machine(report: &mut Report, config: &Config) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = config.cpu.threads.map_or_else(|| "one a core".to_owned(), |n| n.to_string());
    report.fact("processor", &format!("{cores} cores to use; compute threads: {threads}"));
    report.fact("features", &cpu_features());
    #[cfg(feature = "cpu")]
    kernels(report);
    match memory_bytes() {
        Some((total, free)) => {
            let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
            let free = free.map_or_else(String::new, |free| format!(", {} free", gib(free)));
            report.fact("memory", &format!("{}{free}", gib(total)));
        }
        None => report.fact("memory", "unknown"),
    }
}

/// The instruction set that the CPU backend would use, by the environment's wish or its own choice.
#[cfg(feature = "cpu")]
fn kernels(report: &mut Report) {
    use greenroom::model::cpu::{SimdPath, simd::PATH_VARIABLE};
    match SimdPath::from_env() {
        Ok(path) => report.fact("kernels", path.name()),
        Err(error) => report.wrong("kernels", &error.to_string(), &format!("unset {PATH_VARIABLE}")),
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> String {
    let known = [
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ("avx512bw", std::arch::is_x86_feature_detected!("avx512bw")),
        ("avx512vnni", std::arch::is_x86_feature_detected!("avx512vnni")),
        ("avxvnni", std::arch::is_x86_feature_detected!("avxvnni")),
    ];
    let found: Vec<&str> = known.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    if found.is_empty() { "none of those we use: the portable path".to_owned() } else { found.join(" ") }
}

#[cfg(target_arch = "aarch64")]
fn cpu_features() -> String {
    let dotprod = std::arch::is_aarch64_feature_detected!("dotprod");
    if dotprod { "neon dotprod" } else { "neon without dotprod: the portable path" }.to_owned()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> String {
    "the portable path".to_owned()
}

/// Total and, where the system says so, available memory.
fn memory_bytes() -> Option<(u64, Option<u64>)> {
    if let Ok(text) = std::fs::read_to_string("/proc/meminfo") {
        let kib = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        return Some((kib("MemTotal:")? * 1024, kib("MemAvailable:").map(|kib| kib * 1024)));
    }
    let output = std::process::Command::new("sysctl").args(["-n", "hw.memsize"]).output().ok()?;
    Some((String::from_utf8(output.stdout).ok()?.trim().parse().ok()?, None))
}

fn models_here(report: &mut Report) {
    let Some(folder) = home::models() else {
        let cure = "set GREENROOM_HOME to a folder";
        return report.wrong("models", "there is no home folder", cure);
    };
    let mut found: Vec<String> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| models::is_model(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    found.sort();
    let place = folder.display();
    if found.is_empty() {
        let cure = "`greenroom pull demo` gets the demo model; any .gguf file or model folder can be given by its path";
        return report.wrong("models", &format!("none in {place}"), cure);
    }
    report.fact("models", &format!("{} in {place}", found.join(", ")));
}

fn port(report: &mut Report, config: &Config) {
    let mut http = config.http.clone();
    // Trying the socket would leave traces; the port leaves none.
    http.unix_socket = None;
    match Listeners::bind(&http) {
        Ok(_) if http.tcp => report.fact("port", &format!("{}:{} is free", http.host, http.port)),
        Ok(_) => {}
        Err(error) => report.wrong("port", &error.to_string(), "or a Greenroom is already running there"),
    }
}
