//! Start an instance, ask it, read its streams.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use greenroom::actors::{ChatStream, Greenroom, RestartPolicy};
use greenroom::config::Config;
use greenroom::model::fake::{FakeControl, FakeModel, Script};
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, FailureReason, Role};

/// No test takes so long unless something hangs.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs a test inside an actix `System`.
pub fn run(test: impl Future<Output = ()>) {
    actix::System::new().block_on(async {
        tokio::time::timeout(DEADLINE, test).await.expect("the test hangs");
    });
}

/// An instance with one model called `fake`, ready.
pub async fn start(script: Script, change: impl FnOnce(&mut Config)) -> (Greenroom, FakeControl) {
    let mut config = Config::default();
    change(&mut config);
    let model = FakeModel::new("fake", script);
    let control = model.control();
    let greenroom = Greenroom::builder(config)
        .model(Arc::new(model))
        .restarts(RestartPolicy::without_pause())
        .start()
        .await
        .expect("it starts");
    greenroom.ready().await.expect("the model loads");
    (greenroom, control)
}

pub fn ask(text: &str) -> ChatRequest {
    ChatRequest { messages: vec![ChatMessage::text(Role::User, text)], ..ChatRequest::default() }
}

/// Everything up to the end, and that nothing follows.
pub async fn read(mut stream: ChatStream) -> (String, ChatEvent) {
    let mut text = String::new();
    loop {
        match stream.events.recv().await.expect("a stream has an end event") {
            ChatEvent::Text(piece) => text.push_str(&piece),
            end => {
                assert_eq!(stream.events.recv().await, None, "nothing follows the end");
                return (text, end);
            }
        }
    }
}

/// Asks while another row's steps wait at the gate: lets single steps through until the
/// request is in the queue, for the scheduler takes mail between steps only.
pub async fn accepted_between_steps(greenroom: &Greenroom, control: &FakeControl, text: &str) -> ChatStream {
    let mut asking = Box::pin(greenroom.chat(ask(text)));
    loop {
        let step = control.begun();
        if let Ok(accepted) = tokio::time::timeout(Duration::from_millis(50), asking.as_mut()).await {
            return accepted.unwrap();
        }
        control.allow(1);
        assert!(control.wait_begun(step + 1));
    }
}

pub fn failure(end: &ChatEvent) -> Option<FailureReason> {
    match end {
        ChatEvent::Failed(failure) => Some(failure.reason),
        _ => None,
    }
}

/// Waits for something that is read from atomics.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(30), async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what} does not come");
}

/// Stops the instance and checks that everything went back to zero.
pub async fn stop(greenroom: Greenroom) {
    let gauges = Arc::clone(greenroom.handles().gauges());
    until("a quiet instance", || gauges.tickets_live() == 0 && gauges.rows_running.get() == 0).await;
    assert_eq!((gauges.rows_waiting.get(), gauges.rows_parked.get()), (0, 0));
    greenroom.stop().await;
    let text = gauges.render();
    for name in ["tickets_live", "rows_running", "kv_used_bytes", "kv_capacity_bytes", "cache_entries"] {
        assert!(text.contains(&format!("greenroom_{name} 0\n")), "{name} in {text}");
    }
}
