//! `greenroom transcribe`: what is said in audio files, in the terminal.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use greenroom::config::Config;
use greenroom::model::speech::audio::AudioLimits;
use greenroom::model::speech::compute::{Compute, Direct, EngineCell};
use greenroom::model::speech::features::{self, Recording};
use greenroom::model::speech::recognise::{Progress, recognise};
use greenroom::model::speech::source::{SpeechFolder, SpeechSource};
use greenroom::model::speech::tokens::SpeechTokens;
use greenroom::types::speech::{
    self, Format, SpeechFailure, SpeechOptions, Task, Transcription, language_code,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Stop, TranscribeArgs, TranscriptFormat, demo, settings, terminal};
use crate::exit::Exit;

/// Endings that are taken for audio in a folder.
const AUDIO: [&str; 17] = [
    "wav", "flac", "mp3", "mp4", "m4a", "mpga", "mpeg", "ogg", "oga", "opus", "webm", "aac", "aif", "aiff",
    "caf", "mkv", "mka",
];

/// Transcribes every file; the exit code says whether all could be.
pub(super) fn transcribe(args: &TranscribeArgs) -> Result<Exit, Stop> {
    let config = settings::for_run(&args.engine)?;
    let options = options(args)?;
    let files = files(&args.files)?;
    let recogniser = Recogniser::load(args, &config, &options)?;
    let mut exit = Exit::Ok;
    for file in &files {
        let heard = match bytes(file) {
            Ok(bytes) => recogniser.hear(bytes, &options, &file.display().to_string()),
            Err(message) => Err(message),
        };
        match heard {
            Ok(out) => {
                if let Some(warning) = &out.warning {
                    terminal::complain(&format!("{}: {warning}", file.display()));
                }
                let text = speech::write(&out, options.task, format(args.format));
                let written =
                    match (&args.output, files.len() > 1 && matches!(args.format, TranscriptFormat::Text)) {
                        (Some(folder), _) => Ok(save(folder, file, args.format, &text)?),
                        (None, true) => terminal::say(&format!("{}: {text}", file.display())),
                        (None, false) => terminal::say(&text),
                    };
                if written.is_err() {
                    // Nobody reads any more.
                    return Ok(exit);
                }
            }
            Err(message) => {
                terminal::complain(&format!("{}: {message}", file.display()));
                exit = Exit::Failure;
            }
        }
    }
    Ok(exit)
}

fn format(format: TranscriptFormat) -> Format {
    match format {
        TranscriptFormat::Text => Format::Text,
        TranscriptFormat::Srt => Format::Srt,
        TranscriptFormat::Vtt => Format::Vtt,
        TranscriptFormat::Json => Format::Json,
        TranscriptFormat::VerboseJson => Format::VerboseJson,
    }
}

fn options(args: &TranscribeArgs) -> Result<SpeechOptions, Stop> {
    let mut options = SpeechOptions::default();
    if let Some(name) = args.language.as_deref().filter(|name| !name.eq_ignore_ascii_case("auto")) {
        let unknown =
            || Stop::new(Exit::Usage, format!("--language {name}: give a code such as en, de, ja, or auto"));
        options.language = Some(language_code(name).ok_or_else(unknown)?);
    }
    if !(1..=16).contains(&args.beam_size) {
        return Err(Stop::new(Exit::Usage, "--beam-size: from 1 to 16"));
    }
    if !(1..=16).contains(&args.batch_size) {
        return Err(Stop::new(Exit::Usage, "--batch-size: from 1 to 16"));
    }
    (options.beam_size, options.batch_size) = (args.beam_size, args.batch_size);
    if args.hallucination_silence.is_some_and(|seconds| !(0.5..=30.0).contains(&seconds)) {
        return Err(Stop::new(Exit::Usage, "--hallucination-silence: from 0.5 to 30 seconds"));
    }
    options.hallucination_silence_s = args.hallucination_silence;
    options.words = args.words;
    options.task = if args.translate { Task::Translate } else { Task::Transcribe };
    options.prompt = args.prompt.clone().unwrap_or_default();
    if args.no_vad {
        options.vad = None;
    }
    Ok(options)
}

/// The files that are meant: folders stand for the audio in them, `-` for stdin.
fn files(given: &[PathBuf]) -> Result<Vec<PathBuf>, Stop> {
    let mut files = Vec::new();
    for path in given {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = std::fs::read_dir(path)
            .map_err(|error| Stop::new(Exit::Failure, format!("{}: {error}", path.display())))?;
        let is_audio = |path: &PathBuf| {
            let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
            path.is_file() && ending.is_some_and(|ending| AUDIO.contains(&ending.as_str()))
        };
        let mut inside: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_audio).collect();
        if inside.is_empty() {
            return Err(Stop::new(Exit::Failure, format!("{} holds no audio files", path.display())));
        }
        inside.sort();
        files.extend(inside);
    }
    Ok(files)
}

fn bytes(file: &Path) -> Result<Vec<u8>, String> {
    if file != Path::new("-") {
        return std::fs::read(file).map_err(|error| error.to_string());
    }
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Writes a transcript beside others, named after its recording.
fn save(folder: &Path, file: &Path, format: TranscriptFormat, text: &str) -> Result<(), Stop> {
    let ending = match format {
        TranscriptFormat::Text => "txt",
        TranscriptFormat::Srt => "srt",
        TranscriptFormat::Vtt => "vtt",
        TranscriptFormat::Json | TranscriptFormat::VerboseJson => "json",
    };
    let stem = file.file_stem().filter(|_| file != Path::new("-"));
    let name = stem.map_or_else(|| "stdin".into(), |stem| stem.to_string_lossy().into_owned());
    let path = folder.join(format!("{name}.{ending}"));
    let done = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
    done.map_err(|error| Stop::new(Exit::Failure, format!("{}: {error}", path.display())))?;
    terminal::note(&format!("{}\n", path.display()));
    Ok(())
}

/// A loaded model.
struct Recogniser {
    compute: Direct,
    tokens: SpeechTokens,
}

impl Recogniser {
    fn load(args: &TranscribeArgs, config: &Config, options: &SpeechOptions) -> Result<Self, Stop> {
        let path = match (&args.model, demo::named("demo-speech")) {
            (Some(path), _) => path.clone(),
            (None, Some(demo)) => demo.fetch()?,
            (None, None) => return Err(Stop::new(Exit::Usage, "--model: which speech model?")),
        };
        let failed = |error: greenroom::types::LoadError| Stop::new(Exit::Config, error.to_string());
        let loaded = SpeechFolder::new(&path, config).map_err(failed)?.load().map_err(failed)?;
        loaded.tokens.check(options).map_err(|failure| {
            let message = match failure {
                SpeechFailure::Option { field: "task", message } => format!("--translate: {message}"),
                SpeechFailure::Option { field, message } => format!("--{field}: {message}"),
                other => other.to_string(),
            };
            Stop::new(Exit::Usage, message)
        })?;
        let engine = loaded.engine.start().map_err(|error| Stop::new(Exit::Failure, error.to_string()))?;
        Ok(Self { compute: Direct(EngineCell::new(engine)), tokens: loaded.tokens })
    }

    /// Recognises one file; a bar on stderr, where that is a terminal, says how far it is.
    fn hear(&self, bytes: Vec<u8>, options: &SpeechOptions, name: &str) -> Result<Transcription, String> {
        if bytes.is_empty() {
            return Err("the file is empty".into());
        }
        let mels =
            self.compute.cell().with(|engine| Ok(engine.dims().mels)).map_err(|error| error.to_string())?;
        let recording = Recording::Encoded(bytes.into());
        let receiver = features::start(recording, AudioLimits::default(), mels, options.vad_used())
            .map_err(|error| error.to_string())?;
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target).with_message(name.to_owned());
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} s, {eta} left") {
            bar.set_style(style);
        }
        let mut tell = |progress: Progress<'_>| match progress {
            Progress::Surveyed(survey) => bar.set_length(survey.seconds() as u64),
            Progress::Done(seconds) => bar.set_position(seconds as u64),
            Progress::Segment(_) => {}
        };
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
        let heard = recognise(&self.compute, &self.tokens, options, receiver, &mut tell);
        let heard = runtime.block_on(heard).map_err(|error| error.to_string());
        bar.finish_and_clear();
        heard
    }
}
