//! Asking and being answered: places, refusals, streams, turns.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use greenroom::actors::messages::{CacheStatistics, Transcribe};
use greenroom::actors::{Greenroom, Health, ModelState, StartError};
use greenroom::config::Config;
use greenroom::model::fake::{FakeModel, Script};
use greenroom::model::{LoadedModel, ModelSource};
use greenroom::observe::Outcome;
use greenroom::types::{ChatEvent, FinishReason, LoadError, ManualClock, PrepareError, Refusal};

use crate::harness::{ask, read, run, start, stop, until};

#[test]
fn a_question_is_answered_and_its_place_is_given_back() {
    run(async {
        let (greenroom, control) = start(Script::new().say("hello", "Hi there, 🙂!").gated(), |_| {}).await;
        let mut request = ask("hello");
        request.sampling.seed = Some(11);
        let stream = greenroom.chat(request).await.unwrap();
        assert_eq!((stream.model.as_str(), stream.seed), ("fake", 11));
        assert!(stream.prompt_tokens > 5);
        let prompt_tokens = stream.prompt_tokens;
        assert_eq!(greenroom.handles().gauges().tickets_live(), 1, "the ticket is with the row");
        control.open();
        let (text, end) = read(stream).await;
        assert_eq!(text, "Hi there, 🙂!");
        let ChatEvent::Done { finish, usage, .. } = end else { panic!("{end:?}") };
        assert_eq!(finish, FinishReason::Stop);
        assert_eq!(usage.prompt_tokens, prompt_tokens);
        assert_eq!(usage.completion_tokens as usize, "Hi there, 🙂!".len() + 1);
        assert_eq!(greenroom.handles().gauges().tickets_live(), 0, "given back before the end is sent");
        assert_eq!(greenroom.handles().gauges().requests(Outcome::Stop), 1);
        stop(greenroom).await;
    });
}

#[test]
fn many_at_once_get_their_own_answers() {
    run(async {
        let script = (0..40).fold(Script::new(), |script, number| {
            script.say(&format!("word {number}."), &format!("the secret of {number} is {}", number * 7919))
        });
        let (greenroom, _) = start(script, |config| config.scheduler.max_rows = 8).await;
        let asked = (0..40).map(|number| {
            let handles = greenroom.handles();
            async move {
                let stream = handles.chat(ask(&format!("word {number}."))).await.unwrap();
                assert_eq!(read(stream).await.0, format!("the secret of {number} is {}", number * 7919));
            }
        });
        futures_util::future::join_all(asked).await;
        stop(greenroom).await;
    });
}

#[test]
fn a_full_queue_refuses_at_once_and_says_when_to_come_back() {
    run(async {
        let (greenroom, control) = start(Script::new().say("q", "yes").gated(), |config| {
            config.scheduler.max_rows = 1;
            config.scheduler.max_queue = 1;
        })
        .await;
        let first = greenroom.chat(ask("q")).await.unwrap();
        let handles = greenroom.handles();
        let second = actix::spawn(async move { handles.chat(ask("q")).await.unwrap() });
        let gauges = greenroom.handles().gauges().clone();
        until("both places taken", || gauges.tickets_live() == 2).await;
        let refused = greenroom.chat(ask("q")).await.unwrap_err();
        let Refusal::Busy { retry_after } = refused else { panic!("{refused:?}") };
        assert!(retry_after >= Duration::from_secs(1) && retry_after <= Duration::from_secs(60));
        control.open();
        assert_eq!(read(first).await.0, "yes");
        assert_eq!(read(second.await.unwrap()).await.0, "yes");
        assert_eq!(read(greenroom.chat(ask("q")).await.unwrap()).await.0, "yes");
        assert_eq!(greenroom.handles().gauges().requests(Outcome::Refused), 1);
        stop(greenroom).await;
    });
}

#[test]
fn what_cannot_be_prepared_is_refused_with_the_figures_and_frees_its_place() {
    run(async {
        let (greenroom, control) = start(Script::new(), |config| config.engine.context = Some(200)).await;
        let refused = greenroom.chat(ask(&"long ".repeat(100))).await.unwrap_err();
        let Refusal::Prepare(PrepareError::ContextExceeded { prompt, limit }) = refused else {
            panic!("{refused:?}")
        };
        assert!(prompt > 500 && limit == 200);
        let mut unknown = ask("q");
        unknown.model = Some("gpt-9".into());
        let refused = greenroom.chat(unknown).await.unwrap_err();
        assert_eq!(refused, Refusal::UnknownModel { asked: "gpt-9".into(), known: vec!["fake".into()] });
        for name in ["default", "fake"] {
            let mut request = ask("q");
            request.model = Some(name.into());
            request.max_tokens = Some(1);
            read(greenroom.chat(request).await.unwrap()).await;
        }
        assert_eq!(control.begun(), 2);
        stop(greenroom).await;
    });
}

/// A model whose load waits for the test.
struct Held {
    inner: FakeModel,
    gate: Mutex<mpsc::Receiver<()>>,
}

impl ModelSource for Held {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        let _gate = self.gate.lock().unwrap().recv();
        self.inner.load()
    }
}

#[test]
fn while_a_model_is_loaded_requests_are_told_so() {
    run(async {
        let (go, gate) = mpsc::channel();
        let model =
            Held { inner: FakeModel::new("held", Script::new().say("q", "now")), gate: Mutex::new(gate) };
        let greenroom = Greenroom::builder(Config::default()).model(Arc::new(model)).start().await.unwrap();
        assert_eq!(greenroom.health(), Health::Loading);
        let refused = greenroom.chat(ask("q")).await.unwrap_err();
        assert!(matches!(refused, Refusal::Loading { model, .. } if model == "held"));
        assert_eq!(greenroom.handles().models()[0].state, ModelState::Loading);
        go.send(()).unwrap();
        greenroom.ready().await.unwrap();
        assert_eq!(greenroom.health(), Health::Ready);
        let status = &greenroom.handles().models()[0];
        assert_eq!((status.state.clone(), status.context), (ModelState::Ready, Some(4096)));
        assert!(status.facts.iter().any(|(key, value)| key == "device" && value == "scripted"));
        assert_eq!(read(greenroom.chat(ask("q")).await.unwrap()).await.0, "now");
        stop(greenroom).await;
    });
}

#[test]
fn an_instance_without_models_or_with_two_of_one_name_does_not_start() {
    run(async {
        let none = Greenroom::builder(Config::default()).start().await;
        assert!(none.is_err_and(|error| error.to_string().contains("no model")));
        let twice = Greenroom::builder(Config::default())
            .model(Arc::new(FakeModel::new("a", Script::new())))
            .model(Arc::new(FakeModel::new("a", Script::new())))
            .start()
            .await;
        assert!(twice.is_err_and(|error| error.to_string().contains("`a`")));
    });
}

#[test]
fn two_models_answer_each_for_itself() {
    run(async {
        let greenroom = Greenroom::builder(Config::default())
            .model(Arc::new(FakeModel::new("first", Script::new().say("q", "one"))))
            .model(Arc::new(FakeModel::new("second", Script::new().say("q", "two"))))
            .start()
            .await
            .unwrap();
        greenroom.ready().await.unwrap();
        let mut request = ask("q");
        assert_eq!(read(greenroom.chat(request.clone()).await.unwrap()).await.0, "one");
        request.model = Some("second".into());
        assert_eq!(read(greenroom.chat(request).await.unwrap()).await.0, "two");
        stop(greenroom).await;
    });
}

#[test]
fn speech_is_refused_in_plain_words() {
    run(async {
        let (greenroom, _) = start(Script::new(), |_| {}).await;
        let refused = greenroom.handles().transcribe().send(Transcribe::default()).await.unwrap();
        let Err(Refusal::NotAvailable { message }) = refused else { panic!("there is no speech model") };
        assert!(message.starts_with("no speech model is loaded"));
        stop(greenroom).await;
    });
}

/// The prompt cache lives on the compute thread: it must get its turn between steps.
#[test]
fn the_step_loop_leaves_its_neighbours_their_turn() {
    run(async {
        let (greenroom, control) = start(Script::new().repeat("loop", "abc").gated(), |_| {}).await;
        let mut stream = greenroom.chat(ask("loop")).await.unwrap();
        assert!(control.wait_begun(1));
        for round in 0..5 {
            let asked = greenroom.handles().cache().send(CacheStatistics);
            // The gate closes again after three steps: an answer proves a turn among them.
            control.allow(3);
            assert!(asked.await.unwrap().enabled, "round {round}");
            while stream.events.try_recv().is_ok() {}
        }
        drop(stream);
        control.open();
        stop(greenroom).await;
    });
}

#[test]
fn the_age_of_the_last_step_is_known_without_asking_an_actor() {
    run(async {
        let clock = Arc::new(ManualClock::new());
        let model = FakeModel::new("fake", Script::new().say("q", "a").gated());
        let control = model.control();
        let greenroom = Greenroom::builder(Config::default())
            .model(Arc::new(model))
            .clock(clock.clone())
            .start()
            .await
            .unwrap();
        greenroom.ready().await.unwrap();
        let handles = greenroom.handles();
        until("an idle loop", || handles.step_age().is_none()).await;
        let stream = greenroom.chat(ask("q")).await.unwrap();
        assert!(control.wait_begun(1));
        clock.advance(Duration::from_secs(40));
        assert_eq!(handles.step_age(), Some(Duration::from_secs(40)), "the compute thread hangs in a step");
        control.open();
        read(stream).await;
        until("an idle loop", || handles.step_age().is_none()).await;
        stop(greenroom).await;
    });
}

#[test]
fn a_step_that_hangs_is_reported_and_taken_back_if_it_moves_on() {
    run(async {
        let clock = Arc::new(ManualClock::new());
        let model = FakeModel::new("fake", Script::new().say("q", "a").gated());
        let control = model.control();
        let mut config = Config::default();
        config.scheduler.hang_timeout_s = 1;
        let greenroom =
            Greenroom::builder(config).model(Arc::new(model)).clock(clock.clone()).start().await.unwrap();
        greenroom.ready().await.unwrap();
        let handles = greenroom.handles();
        let stream = greenroom.chat(ask("q")).await.unwrap();
        assert!(control.wait_begun(1));
        clock.advance(Duration::from_secs(2));
        until("the report", || matches!(handles.health(), Health::Failed { .. })).await;
        control.open();
        assert_eq!(read(stream).await.0, "a");
        until("the end of it", || handles.health() == Health::Ready).await;
        stop(greenroom).await;
    });
}

#[test]
fn the_context_is_what_memory_has_room_for_and_a_longer_prompt_disturbs_nobody() {
    run(async {
        let script = Script::new().say("hello", "a short answer").memory(8, 16).gated();
        let (greenroom, control) = start(script, |_| {}).await;
        assert_eq!(greenroom.handles().models()[0].context, Some(128), "eight blocks of sixteen");
        let other = greenroom.chat(ask("hello")).await.unwrap();
        let refused = greenroom.chat(ask(&"long ".repeat(40))).await.unwrap_err();
        assert!(
            matches!(refused, Refusal::Prepare(PrepareError::ContextExceeded { limit: 128, .. })),
            "{refused:?}"
        );
        control.open();
        assert_eq!(read(other).await.0, "a short answer");
        stop(greenroom).await;
    });
}

#[test]
fn settings_that_make_no_sense_are_named_and_start_nothing() {
    run(async {
        let mut config = Config::default();
        config.scheduler.max_queue = usize::MAX;
        config.scheduler.max_rows = 0;
        let model = FakeModel::new("fake", Script::new());
        let control = model.control();
        let Err(error) = Greenroom::builder(config).model(Arc::new(model)).start().await else {
            panic!("it starts")
        };
        for key in ["scheduler.max_queue", "scheduler.max_rows"] {
            assert!(error.to_string().contains(key), "{error}");
        }
        assert!(matches!(error, StartError::Config { problems } if problems.len() == 2));
        assert_eq!(control.loads(), 0);
    });
}
