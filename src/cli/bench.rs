//! `greenroom bench`: how fast a model is served, in this process or by any
//! server that speaks OpenAI's API.
//!
//! Every prompt begins with words of its own, other ones in every run, so that no
//! cache helps; tokens that came from one all the same are not counted as computed. Requests
//! are greedy and ignore the end of the text, where the server can. Figures are
//! medians over rounds; the load average stands beside them, because on a busy
//! machine they say little.

mod figures;
mod report;
mod target;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use greenroom::Greenroom;
use greenroom::model::source::FileModel;

use self::figures::{Answer, Burst, Prefill};
use self::report::Report;
use self::target::{Ask, Target};
use super::{BenchArgs, Stop, home, log, settings, terminal};
use crate::exit::Exit;

/// How long threads get to end.
const STOP_LIMIT: Duration = Duration::from_secs(3);
/// Most clients at once.
const MAX_CLIENTS: usize = 512;

/// Measures and prints.
pub(super) fn bench(args: &BenchArgs) -> Result<Exit, Stop> {
    check(args)?;
    let config = settings::for_run(&args.engine)?;
    let _written_at_the_end = log::install(&config.log)?;
    let system = actix_rt::System::new();
    if let Some(url) = &args.url {
        let target = Target::server(url, args.model.as_deref())?;
        return system.block_on(measure(&target, args, None)).and_then(|report| print(&report, args));
    }
    let found = home::model(args.model.as_deref(), &config)?;
    let mut config = config;
    // All clients must be admitted at once: the queue is not what is measured.
    let rows = args.concurrency.iter().copied().max().unwrap_or(1).max(config.scheduler.max_rows);
    config.scheduler.max_rows = rows;
    let model =
        FileModel::new(&found.path, &config).map_err(|error| Stop::new(Exit::Config, error.to_string()))?;
    let report = system.block_on(async {
        let greenroom = Greenroom::builder(config)
            .model(Arc::new(model))
            .start()
            .await
            .map_err(|error| Stop::new(Exit::Software, error.to_string()))?;
        let report = match greenroom.ready().await {
            Ok(()) => measure(&Target::here(&greenroom), args, Some(rows)).await,
            Err(message) => Err(Stop::new(Exit::Config, message)),
        };
        // Threads that do not end in time end with the process.
        let _ = tokio::time::timeout(STOP_LIMIT, greenroom.stop()).await;
        report
    })?;
    print(&report, args)
}

fn check(args: &BenchArgs) -> Result<(), Stop> {
    let wrong = |message: String| Err(Stop::new(Exit::Usage, message));
    match args.concurrency.iter().find(|&&clients| !(1..=MAX_CLIENTS).contains(&clients)) {
        Some(clients) => wrong(format!("--concurrency: {clients} is not from 1 to {MAX_CLIENTS}")),
        None if args.prompt < 16 => wrong(format!("--prompt: {} is not at least 16", args.prompt)),
        None if args.context < 16 => wrong(format!("--context: {} is not at least 16", args.context)),
        None if args.generate < 2 => wrong(format!("--gen: {} is not at least 2", args.generate)),
        None if args.rounds == 0 => wrong("--rounds: 0 is not at least 1".to_owned()),
        None => Ok(()),
    }
}

fn print(report: &Report, args: &BenchArgs) -> Result<Exit, Stop> {
    let text = if args.json { report.json() } else { report.table() };
    // Nobody reading is no failure.
    let _ = terminal::say(&text);
    Ok(Exit::Ok)
}

async fn measure(target: &Target<'_>, args: &BenchArgs, rows: Option<usize>) -> Result<Report, Stop> {
    let load_before = figures::load_average();
    let mut words = Words::fresh();
    let density = density(target, &mut words).await?;
    let mut prefills = Vec::new();
    for _ in 0..args.rounds {
        let ask = Ask { prompt: words.about(args.prompt, density), tokens: 1 };
        prefills.push(Prefill::of(&target.ask(&ask).await?));
    }
    let mut bursts = Vec::new();
    for &clients in &args.concurrency {
        for _ in 0..args.rounds {
            bursts.push(burst(target, &mut words, clients, args, density).await?);
        }
    }
    Ok(Report {
        target: target.name(),
        prompt: args.prompt,
        context: args.context,
        generate: args.generate,
        rounds: args.rounds,
        prefill: Prefill::median(&prefills),
        decode: args.concurrency.iter().map(|&clients| Burst::median(&bursts, clients)).collect(),
        peak_memory: target.peak_memory(),
        rows,
        load_before,
        load_after: figures::load_average(),
    })
}

async fn burst(
    target: &Target<'_>,
    words: &mut Words,
    clients: usize,
    args: &BenchArgs,
    density: f64,
) -> Result<Burst, Stop> {
    let asked: Vec<Ask> = (0..clients)
        .map(|_| Ask { prompt: words.about(args.context, density), tokens: args.generate })
        .collect();
    let began = std::time::Instant::now();
    let answers = futures_util::future::join_all(asked.iter().map(|ask| target.ask(ask))).await;
    let wall = began.elapsed();
    let answers = answers.into_iter().collect::<Result<Vec<Answer>, Stop>>()?;
    Ok(Burst::of(&answers, wall))
}

/// Tokens of a word, as the server counts them; it also warms everything up.
async fn density(target: &Target<'_>, words: &mut Words) -> Result<f64, Stop> {
    const WORDS: u32 = 64;
    let answer = target.ask(&Ask { prompt: words.text(WORDS), tokens: 8 }).await?;
    Ok((f64::from(answer.prompt_tokens) / f64::from(WORDS)).max(0.1))
}

/// Words without end, no two prompts alike.
struct Words {
    state: u64,
}

impl Words {
    /// Other ones than in any run before: a server may still remember those.
    fn fresh() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { state: now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32 }
    }

    fn about(&mut self, tokens: u32, density: f64) -> String {
        // At most one word a token, and never none.
        self.text(((f64::from(tokens) / density).round() as u32).clamp(1, tokens))
    }

    fn text(&mut self, count: u32) -> String {
        const WORDS: [&str; 32] = [
            "river", "house", "green", "morning", "stone", "light", "water", "song", "road", "winter",
            "bread", "ship", "garden", "letter", "music", "tower", "horse", "silver", "market", "forest",
            "window", "summer", "paper", "bridge", "cloud", "field", "island", "candle", "mirror", "harbour",
            "valley", "star",
        ];
        let mut text = String::new();
        for _ in 0..count {
            // A linear congruential generator (Knuth's constants); its high bits are good enough for words.
            self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let word = WORDS[(self.state >> 59) as usize];
            text.push_str(if text.is_empty() { "" } else { " " });
            text.push_str(word);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Words;

    #[test]
    fn no_two_prompts_begin_alike() {
        let mut words = Words { state: 0 };
        let prompts: Vec<String> = (0..200).map(|_| words.about(40, 1.3)).collect();
        let begins: std::collections::HashSet<String> =
            prompts.iter().map(|prompt| prompt.split(' ').take(8).collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(begins.len(), prompts.len());
        assert!(prompts.iter().all(|prompt| prompt.split(' ').count() == 31));
    }
}
