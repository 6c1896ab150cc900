//! What a body may take: places for large ones, and values counted before parsing.

use actix_web::test::TestRequest;
use actix_web::{FromRequest, HttpRequest, dev};
use futures_util::FutureExt;
use proptest::prelude::*;

use super::*;

/// Any JSON; strings hold what counts outside of them.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        r#"[\[{,"\\a]{0,9}"#.prop_map(Value::from)
    ];
    leaf.prop_recursive(6, 60, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((r#"[\[{,"\\a-z]{0,9}"#, inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// Values in a tree, itself included.
fn values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(values).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(values).sum::<usize>(),
        _ => 1,
    }
}

/// Brackets and commas that are not in strings.
fn marks(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.len().max(1) + items.iter().map(marks).sum::<usize>(),
        Value::Object(map) => map.len().max(1) + map.values().map(marks).sum::<usize>(),
        _ => 0,
    }
}

proptest! {
    #[test]
    fn every_value_counts_and_no_string_does(value in any_json()) {
        let count = structure(value.to_string().as_bytes());
        prop_assert_eq!(count, marks(&value));
        prop_assert!(values(&value) <= count + 1);
        prop_assert_eq!(structure(serde_json::to_string_pretty(&value).unwrap().as_bytes()), count);
    }
}

fn payload(bytes: usize) -> web::Payload {
    let (request, mut payload): (HttpRequest, dev::Payload) =
        TestRequest::default().set_payload(vec![b' '; bytes]).to_http_parts();
    web::Payload::from_request(&request, &mut payload).into_inner().unwrap()
}

#[actix_web::test]
async fn large_bodies_wait_for_a_place_and_small_ones_do_not() {
    let places = Semaphore::new(1);
    let limit = 4 * LARGE_BODY;
    let config = HttpConfig { max_json_bytes: limit, ..HttpConfig::default() };
    let (bytes, held) = read_bytes(payload(LARGE_BODY + 1), &config, &places).await.unwrap();
    assert_eq!(bytes.len(), LARGE_BODY + 1);
    let mut second = Box::pin(read_bytes(payload(limit), &config, &places));
    assert!(second.as_mut().now_or_never().is_none(), "there is one place");
    assert!(read_bytes(payload(LARGE_BODY), &config, &places).await.unwrap().1.is_none());
    drop(held);
    assert!(second.await.unwrap().1.is_some());
    assert!(read_bytes(payload(limit + 1), &config, &places).await.is_err());
    assert_eq!(places.available_permits(), 1, "every place is given back");
}
