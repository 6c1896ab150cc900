//! Another application with Greenroom inside: its own server, its own signal
//! handler, an actor of its own that asks for answers, and Greenroom's routes
//! under `/ai`.
//!
//! ```sh
//! cargo run --example embed --no-default-features --features cpu -- path/to/model.gguf
//! curl http://127.0.0.1:8090/about
//! curl http://127.0.0.1:8090/haiku/rain
//! curl http://127.0.0.1:8090/ai/v1/models
//! ```
//!
//! Greenroom installs no signal handler, no subscriber and no panic hook here,
//! and stopping it stops neither this System nor this process.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use actix_web::{App, HttpResponse, HttpServer, web};
use greenroom::actors::OpenChat;
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Refusal, Role};
use greenroom::{Config, Greenroom};

/// This application's own actor. It knows Greenroom by one recipient.
struct Poet {
    chat: Recipient<OpenChat>,
}

/// Asks the poet for a haiku.
#[derive(Message)]
#[rtype(result = "Result<String, Refusal>")]
struct Write {
    about: String,
}

impl Actor for Poet {
    type Context = Context<Self>;
}

impl Handler<Write> for Poet {
    type Result = ResponseFuture<Result<String, Refusal>>;

    fn handle(&mut self, message: Write, _: &mut Self::Context) -> Self::Result {
        let chat = self.chat.clone();
        Box::pin(async move {
            let request = ChatRequest {
                messages: vec![ChatMessage::text(
                    Role::User,
                    format!("Write a haiku about {}.", message.about),
                )],
                max_tokens: Some(64),
                ..ChatRequest::default()
            };
            // A refusal is an answer; a closed mailbox means that Greenroom has been stopped.
            let mut stream = chat.send(OpenChat { request }).await.unwrap_or(Err(Refusal::Draining))?;
            let mut poem = String::new();
            while let Some(event) = stream.events.recv().await {
                match event {
                    ChatEvent::Text(text) => poem.push_str(&text),
                    ChatEvent::Done { .. } => break,
                    ChatEvent::Failed(failure) => return Err(Refusal::Internal { message: failure.message }),
                    // What nobody asked for does not come.
                    _ => {}
                }
            }
            Ok(poem)
        })
    }
}

async fn haiku(poet: web::Data<Addr<Poet>>, about: web::Path<String>) -> HttpResponse {
    match poet.send(Write { about: about.into_inner() }).await {
        Ok(Ok(poem)) => HttpResponse::Ok().body(poem),
        Ok(Err(refusal)) => HttpResponse::ServiceUnavailable().body(refusal.to_string()),
        Err(gone) => HttpResponse::InternalServerError().body(gone.to_string()),
    }
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: embed path/to/model.gguf")?;
    let config = Config::default();
    let model = Arc::new(FileModel::new(&path, &config)?);

    // Returns at once; the model loads in the background.
    let greenroom = Greenroom::builder(config.clone()).model(model).start().await?;
    let poet = Poet { chat: greenroom.open_chat() }.start();

    // Made once, outside the factory, which runs once a worker.
    let ai = greenroom::http::configure(greenroom.handles(), &config.http);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(poet.clone()))
            .route("/about", web::get().to(|| async { "an application of its own" }))
            .route("/haiku/{about}", web::get().to(haiku))
            .service(web::scope("/ai").configure(ai.clone()))
    })
    .workers(2)
    // So that an answer is not computed for a client that has gone.
    .h1_allow_half_closed(false)
    .disable_signals()
    .bind(("127.0.0.1", 8090))?
    .run();
    let handle = server.handle();
    let running = actix_web::rt::spawn(server);

    // This application's signal handler decides when and how to end.
    tokio::signal::ctrl_c().await?;
    greenroom.drain(Duration::from_secs(5)).await;
    handle.stop(true).await;
    running.await??;
    greenroom.stop().await;
    Ok(())
}
