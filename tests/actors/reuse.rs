//! Prompt reuse as an application sees it.

use greenroom::actors::messages::{CacheStatistics, ClearCache};
use greenroom::model::fake::Script;
use greenroom::types::{ChatEvent, ChatMessage, Role};

use crate::harness::{ask, read, run, start, stop, until};

#[test]
fn the_next_turn_of_a_conversation_reuses_the_last_one() {
    run(async {
        let (greenroom, _) =
            start(Script::new().say("first", "an answer").say("second", "another"), |_| {}).await;
        let mut conversation = ask("the first question");
        let (answer, _) = read(greenroom.chat(conversation.clone()).await.unwrap()).await;
        assert_eq!(answer, "an answer");
        conversation.messages.push(ChatMessage::text(Role::Assistant, answer));
        conversation.messages.push(ChatMessage::text(Role::User, "a second question"));
        let stream = greenroom.chat(conversation).await.unwrap();
        let (answer, end) = read(stream).await;
        assert_eq!(answer, "another");
        let ChatEvent::Done { usage, .. } = end else { panic!("{end:?}") };
        // Up to and with the first answer's last character.
        let kept = "<>user\nthe first question<>\n<>assistant\nan answer".len() - 3;
        assert_eq!(usage.cached_tokens as usize, kept);
        let report = greenroom.handles().cache().send(CacheStatistics).await.unwrap();
        assert_eq!((report.entries, report.hits, report.misses), (1, 1, 1), "the longer row has it all");
        assert_eq!(report.hit_tokens, u64::from(usage.cached_tokens));
        assert!(report.enabled && report.kind.contains("nothing on disk"), "{report:?}");
        stop(greenroom).await;
    });
}

#[test]
fn a_cleared_cache_gives_its_memory_back() {
    run(async {
        let (greenroom, _) = start(Script::new().say("q", "a long enough answer"), |_| {}).await;
        read(greenroom.chat(ask("q")).await.unwrap()).await;
        let handles = greenroom.handles();
        assert!(handles.gauges().kv_used_bytes.get() > 0);
        let report = handles.clear_cache().send(ClearCache::default()).await.unwrap();
        assert_eq!(report.entries, 0);
        until("the memory", || handles.gauges().kv_used_bytes.get() == 0).await;
        let (_, end) = read(greenroom.chat(ask("q")).await.unwrap()).await;
        assert!(matches!(end, ChatEvent::Done { usage, .. } if usage.cached_tokens == 0));
        stop(greenroom).await;
    });
}

#[test]
fn a_disabled_cache_says_so_and_keeps_nothing() {
    run(async {
        let (greenroom, _) = start(Script::new(), |config| config.cache.enabled = false).await;
        let mut request = ask("a question that is long enough to be kept");
        request.max_tokens = Some(20);
        for _ in 0..2 {
            let (_, end) = read(greenroom.chat(request.clone()).await.unwrap()).await;
            assert!(matches!(end, ChatEvent::Done { usage, .. } if usage.cached_tokens == 0));
        }
        let report = greenroom.handles().cache().send(CacheStatistics).await.unwrap();
        assert!(!report.enabled);
        assert_eq!((report.entries, report.hits, report.misses), (0, 0, 0));
        assert_eq!(greenroom.handles().gauges().kv_used_bytes.get(), 0);
        stop(greenroom).await;
    });
}
