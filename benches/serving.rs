//! How fast the demo model is served, in process: decode with one client and with eight, and
//! prefill, each beside a limit measured in the same run.
//!
//! `make bench`, or `cargo bench --bench serving -- path/to/model.gguf`. The limit of a decode
//! step is memory: all weights are read once a step, whatever the number of rows, so the ratio
//! says how much of the machine's bandwidth one row's decode uses.

#![allow(clippy::print_stdout, reason = "its figures are its output")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role, SamplingOptions, Timings, Usage};
use greenroom::{Config, Greenroom};

type Failed = Box<dyn std::error::Error>;

/// One request's figures.
struct Answer {
    usage: Usage,
    timings: Timings,
}

fn request(prompt: &str, tokens: u32) -> ChatRequest {
    ChatRequest {
        messages: vec![ChatMessage::text(Role::User, prompt)],
        sampling: SamplingOptions { temperature: Some(0.0), ..Default::default() },
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..Default::default()
    }
}

async fn ask(greenroom: &Greenroom, request: ChatRequest) -> Result<Answer, Failed> {
    let mut stream = greenroom.chat(request).await?;
    while let Some(event) = stream.events.recv().await {
        match event {
            ChatEvent::Text(_) => {}
            ChatEvent::Done { usage, timings, .. } => return Ok(Answer { usage, timings }),
            ChatEvent::Failed(failure) => return Err(failure.message.into()),
        }
    }
    Err("the stream ended without an end".into())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Bytes a second that two threads read from memory.
fn memory_bandwidth() -> f64 {
    let buffer: Arc<Vec<u64>> = Arc::new((0..32 << 20).collect());
    let half = buffer.len() / 2;
    let read = || {
        let began = Instant::now();
        let parts: Vec<_> = (0..2)
            .map(|part| {
                let buffer = Arc::clone(&buffer);
                std::thread::spawn(move || {
                    buffer[part * half..(part + 1) * half]
                        .iter()
                        .fold(0u64, |sum, value| sum.wrapping_add(*value))
                })
            })
            .collect();
        for part in parts {
            std::hint::black_box(part.join().unwrap_or(0));
        }
        (buffer.len() * size_of::<u64>()) as f64 / began.elapsed().as_secs_f64()
    };
    median((0..7).map(|_| read()).collect())
}

/// Tokens a second of `clients` asking at once: each one's median decode speed, and the total.
async fn decode(greenroom: &Greenroom, clients: usize) -> Result<(f64, f64), Failed> {
    const TOKENS: u32 = 128;
    let (mut alone, mut total) = (Vec::new(), Vec::new());
    for round in 0..3 {
        let began = Instant::now();
        let asked = (0..clients).map(|client| {
            ask(greenroom, request(&format!("Client {client}, round {round}: tell me about rivers."), TOKENS))
        });
        let answers = futures_util::future::join_all(asked).await;
        let elapsed = began.elapsed().as_secs_f64();
        let mut tokens = 0;
        for answer in answers {
            let answer = answer?;
            tokens += answer.usage.completion_tokens;
            alone.push(f64::from(answer.usage.completion_tokens - 1) / answer.timings.decode.as_secs_f64());
        }
        total.push(f64::from(tokens) / elapsed);
    }
    Ok((median(alone), median(total)))
}

/// Prompt tokens a second for a prompt of about 500 tokens that no cache knows.
async fn prefill(greenroom: &Greenroom) -> Result<f64, Failed> {
    let mut speeds = Vec::new();
    for round in 0..5 {
        let prompt =
            format!("{round} times {}", "the river runs past the old mill and on to the sea ".repeat(38));
        let answer = ask(greenroom, request(&prompt, 1)).await?;
        let computed = answer.usage.prompt_tokens - answer.usage.cached_tokens;
        speeds.push(f64::from(computed) / answer.timings.prefill.as_secs_f64());
    }
    Ok(median(speeds))
}

fn load_average() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .map_or_else(|_| "unknown".into(), |text| text.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// The model named on the command line, or the demo model's usual place.
fn model() -> Result<PathBuf, Failed> {
    if let Some(named) = std::env::args().skip(1).find(|argument| !argument.starts_with('-')) {
        return Ok(named.into());
    }
    if let Some(path) = std::env::var_os("GREENROOM_DEMO_MODEL") {
        return Ok(path.into());
    }
    let home = std::env::var_os("GREENROOM_HOME").map(PathBuf::from).or_else(|| {
        std::env::home_dir().map(|home| {
            home.join(if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/share" })
                .join("greenroom")
        })
    });
    let path = home.ok_or("no home folder")?.join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.is_file() { Ok(path) } else { Err("no demo model: run `make model`".into()) }
}

async fn measure() -> Result<(), Failed> {
    let path = model()?;
    let config = Config::default();
    let bytes = std::fs::metadata(&path)?.len() as f64;
    let began = Instant::now();
    let source = Arc::new(FileModel::new(&path, &config)?);
    let greenroom = Greenroom::builder(config).model(source).start().await?;
    greenroom.ready().await?;
    println!("load average before: {}", load_average());
    println!("loaded in {:.2} s", began.elapsed().as_secs_f64());
    let limit = memory_bandwidth() / bytes;
    println!("limit of one row: {limit:.0} tokens/s (memory read by two threads ÷ file size)");
    ask(&greenroom, request("Warm up.", 8)).await?;
    let (one, _) = decode(&greenroom, 1).await?;
    println!("decode, 1 client:  {one:.1} tokens/s, {:.2} of the limit", one / limit);
    let (each, total) = decode(&greenroom, 8).await?;
    println!(
        "decode, 8 clients: {total:.1} tokens/s in all ({each:.1} each), {:.2} × one client",
        total / one
    );
    let prompt = prefill(&greenroom).await?;
    println!("prefill, 500 tokens: {prompt:.1} tokens/s, {:.2} × one client's decode", prompt / one);
    println!("load average after: {}", load_average());
    greenroom.drain(Duration::from_secs(1)).await;
    greenroom.stop().await;
    Ok(())
}

fn main() -> Result<(), Failed> {
    // `cargo test` runs benches to see that they start; that takes no model.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    actix::System::new().block_on(measure())
}
