//! What scheduler and HTTP cost a token, with an engine that costs nothing.
//!
//! `cargo bench --bench overhead --no-default-features --features fake`, with `-- --help` for what can be set. Many streams
//! decode at once: through the actors alone, then through real sockets as server-sent events, then so with an engine whose steps take
//! some time. The first two say how much goes through at most; then many tokens share a write. In the last each token is woken for,
//! written and read by itself, which is what it costs in use. The client counts events in one thread; how much processor time each
//! thread took stands below, so that a busy machine or a slow client shows.
//!
//! The engine draws the same letter again and again: not an engine's correctness is looked at, only that every token arrives.

#![allow(clippy::print_stdout, reason = "its figures are its output")]

mod client;
mod engine;
mod processor;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::http::{HttpFront, Listeners};
use greenroom::{Config, Greenroom, Handles};

use client::Load;
use engine::InstantModel;
use processor::ThreadTimes;

type Failed = Box<dyn Error + Send + Sync>;

/// What one round took.
struct Round {
    wall: Duration,
    threads: ThreadTimes,
}

/// What is asked for on the command line.
struct Options {
    load: Load,
    rounds: usize,
    /// Threads that serve connections; the settings' default without it.
    workers: Option<usize>,
    /// Of the last figure.
    step: Duration,
}

const USAGE: &str =
    "options: --streams N (64), --tokens N (1000), --rounds N (5), --workers N, --step-us N (2000)";

fn main() -> Result<(), Failed> {
    let Some(options) = options(std::env::args().skip(1))? else {
        println!("{USAGE}");
        return Ok(());
    };
    let mut config = Config::default();
    config.http.port = 0;
    config.scheduler.max_rows = options.load.streams;
    config.http.workers = options.workers.unwrap_or(config.http.workers);
    println!(
        "{} streams of {} tokens, medians of {} rounds; load average {}",
        options.load.streams,
        options.load.tokens,
        options.rounds,
        processor::load_average()
    );
    actix_rt::System::new().block_on(async {
        let listeners = Listeners::bind(&config.http)?;
        let model = InstantModel::default();
        let step_time = model.step_time.clone();
        let greenroom = Greenroom::builder(config.clone()).model(Arc::new(model)).start().await?;
        greenroom.ready().await?;
        let serving = HttpFront::serve(greenroom.handles(), &config.http, listeners)?;
        let address = serving.address.ok_or("the server has no address")?;
        let load = options.load;
        report("actors alone", &options, greenroom.handles(), move |handles| client::actors(load, handles))
            .await?;
        report("with HTTP", &options, greenroom.handles(), move |_| client::http(load, address)).await?;
        step_time.set(options.step);
        let name = format!("with HTTP, steps of {} µs", options.step.as_micros());
        report(&name, &options, greenroom.handles(), move |_| client::http(load, address)).await?;
        serving.stop(false).await;
        greenroom.stop().await;
        Ok(())
    })
}

/// Measures rounds after one that warms up, and prints the median one.
async fn report(
    name: &str,
    options: &Options,
    handles: Handles,
    run: impl Fn(Handles) -> Result<(), Failed> + Clone + Send + 'static,
) -> Result<(), Failed> {
    let mut rounds = Vec::new();
    for round in 0..=options.rounds {
        let measured = measure(handles.clone(), run.clone()).await?;
        if round > 0 {
            rounds.push(measured);
        }
    }
    rounds.sort_by_key(|round| round.wall);
    let median = rounds.swap_remove(rounds.len() / 2);
    let tokens = options.load.streams as f64 * f64::from(options.load.tokens);
    let (server, client) = median.threads.of_server_and_client();
    let each = |took: Duration| took.as_secs_f64() * 1e6 / tokens;
    println!(
        "\n{name}: {:.0} tokens/s; processor time a token: server {:.2} µs, client {:.2} µs",
        tokens / median.wall.as_secs_f64(),
        each(server),
        each(client)
    );
    for (thread, took) in median.threads.busiest() {
        println!(
            "  {:6.2} µs a token, busy {:3.0} %  {thread}",
            each(took),
            100.0 * took.as_secs_f64() / median.wall.as_secs_f64()
        );
    }
    Ok(())
}

/// One round on the client's thread, which this one, the system's, waits for without blocking.
async fn measure(
    handles: Handles,
    run: impl FnOnce(Handles) -> Result<(), Failed> + Send + 'static,
) -> Result<Round, Failed> {
    let (send, done) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name(processor::CLIENT.into()).spawn(move || {
        let before = ThreadTimes::now();
        let began = Instant::now();
        let result = run(handles);
        let wall = began.elapsed();
        // The thread's own time is read before it ends.
        let round = result.map(|()| Round { wall, threads: ThreadTimes::now().since(&before) });
        let _nobody_waits = send.send(round);
    })?;
    done.await?
}

/// `None` where help is asked for.
fn options(mut words: impl Iterator<Item = String>) -> Result<Option<Options>, Failed> {
    let mut options = Options {
        load: Load { streams: 64, tokens: 1000 },
        rounds: 5,
        workers: None,
        step: Duration::from_millis(2),
    };
    while let Some(word) = words.next() {
        let mut number = || -> Result<usize, Failed> {
            let value = words.next().ok_or_else(|| format!("{word}: needs a number"))?;
            let number = value.parse().map_err(|_| format!("{word}: {value} is no number"))?;
            if number == 0 { Err(format!("{word}: must be at least 1").into()) } else { Ok(number) }
        };
        match word.as_str() {
            // Cargo says it to every bench.
            "--bench" => {}
            "--help" => return Ok(None),
            "--streams" => options.load.streams = number()?,
            "--tokens" => options.load.tokens = u32::try_from(number()?)?,
            "--rounds" => options.rounds = number()?,
            "--step-us" => options.step = Duration::from_micros(number()? as u64),
            "--workers" => options.workers = Some(number()?),
            _ => return Err(format!("{word}: not known; {USAGE}").into()),
        }
    }
    if options.load.tokens > engine::CONTEXT - client::PROMPT_ROOM {
        let most = engine::CONTEXT - client::PROMPT_ROOM;
        return Err(format!("--tokens: at most {most} fit the context").into());
    }
    Ok(Some(options))
}
