//! Responses that can be had again and gone on from: in memory, the oldest go first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::types::ChatMessage;

/// Most responses kept.
const MAX_RESPONSES: usize = 1024;
/// Most bytes of text kept, of all together.
const MAX_BYTES: usize = 64 << 20;

/// A response that was given.
#[derive(Debug)]
pub struct Stored {
    /// As it was answered.
    pub body: Value,
    /// Items of its request.
    pub input: Vec<Value>,
    /// The conversation up to its end, instructions not included.
    pub conversation: Vec<ChatMessage>,
    /// The prompt cache's name for the conversation.
    pub session: Option<String>,
}

impl Stored {
    /// What it takes, about.
    fn bytes(&self) -> usize {
        let said = |message: &ChatMessage| {
            let texts = [&message.content, &message.reasoning].into_iter().flatten().map(String::len);
            let calls = message.tool_calls.iter().map(|call| call.name.len() + size(&call.arguments));
            texts.chain(calls).sum::<usize>() + 100
        };
        let input = self.input.iter().map(size).sum::<usize>();
        size(&self.body) + input + self.conversation.iter().map(said).sum::<usize>()
    }
}

/// Bytes of a value, about.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => 32 + text.len(),
        Value::Array(items) => 32 + items.iter().map(size).sum::<usize>(),
        Value::Object(map) => 32 + map.iter().map(|(key, value)| 64 + key.len() + size(value)).sum::<usize>(),
        _ => 32,
    }
}

#[derive(Debug, Default)]
struct Kept {
    responses: HashMap<String, (Arc<Stored>, usize)>,
    /// Oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let Some((_, bytes)) = self.responses.remove(id) else { return false };
        self.bytes -= bytes;
        self.order.retain(|other| other != id);
        true
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Store {
    kept: Mutex<Kept>,
}

impl Store {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Nothing in here panics halfway.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response; one that is too large by itself is not kept.
    pub fn put(&self, id: &str, stored: Stored) {
        let bytes = stored.bytes();
        if bytes > MAX_BYTES {
            return;
        }
        let mut kept = self.kept();
        kept.remove(id);
        while kept.responses.len() >= MAX_RESPONSES || kept.bytes + bytes > MAX_BYTES {
            let Some(oldest) = kept.order.front().cloned() else { break };
            kept.remove(&oldest);
        }
        kept.bytes += bytes;
        kept.order.push_back(id.to_owned());
        kept.responses.insert(id.to_owned(), (Arc::new(stored), bytes));
    }

    /// One that is kept.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        self.kept().responses.get(id).map(|(stored, _)| Arc::clone(stored))
    }

    /// Forgets one; whether it was there.
    pub fn remove(&self, id: &str) -> bool {
        self.kept().remove(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Role;

    fn stored(bytes: usize) -> Stored {
        let conversation = vec![ChatMessage::text(Role::User, "x".repeat(bytes))];
        Stored { body: Value::Null, input: Vec::new(), conversation, session: None }
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many_or_they_are_too_large() {
        let store = Store::default();
        for number in 0..=MAX_RESPONSES {
            store.put(&number.to_string(), stored(1));
        }
        assert!(store.get("0").is_none() && store.get("1").is_some());
        store.put("large", stored(MAX_BYTES - 1000));
        assert!(store.get(&MAX_RESPONSES.to_string()).is_none_or(|_| store.get("2").is_none()));
        assert!(store.get("large").is_some());
        store.put("larger", stored(MAX_BYTES + 1));
        assert!(store.get("larger").is_none() && store.get("large").is_some());
        assert!(store.remove("large") && !store.remove("large"));
        let kept = store.kept();
        assert_eq!(kept.bytes, kept.responses.values().map(|(_, bytes)| bytes).sum::<usize>());
    }
}
