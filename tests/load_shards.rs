//! GGUF models in several files: any part leads to all, and parts that are missing, cut or
//! another model's are refused by name.
#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;
mod gguf;

use std::fs;
use std::path::{Path, PathBuf};

use common::data;
use gguf::File;
use greenroom::model::load::{self, ModelFiles};
use greenroom::types::LoadError;

fn whole(name: &str) -> File {
    File::parse(&fs::read(data(&format!("tiny/gguf-{name}/{name}.gguf"))).expect("reads"))
}

fn path(folder: &Path, number: usize, count: usize) -> PathBuf {
    folder.join(format!("tiny-{number:05}-of-{count:05}.gguf"))
}

fn write(folder: &Path, parts: &[File]) {
    for (index, part) in parts.iter().enumerate() {
        fs::write(path(folder, index + 1, parts.len()), part.bytes()).expect("writes");
    }
}

/// Three parts in a folder, spoilt by `edit` before they are written.
fn parts(edit: impl FnOnce(&mut Vec<File>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut parts = whole("llama-q4_k").split(3);
    edit(&mut parts);
    write(folder.path(), &parts);
    folder
}

fn values(files: &ModelFiles) -> Vec<(String, Vec<f32>)> {
    let names: Vec<String> = files.tensors.names().map(str::to_owned).collect();
    let value = |name: String| {
        let shape = files.tensors.shape(&name).expect("is there").to_vec();
        let values = match shape[..] {
            [len] => files.tensors.vector(&name, len).expect("a vector"),
            [rows, cols] => {
                let matrix = files.tensors.matrix(&name, rows, cols).expect("a matrix");
                let mut all = vec![0.0; rows * cols];
                for (row, out) in all.chunks_exact_mut(cols).enumerate() {
                    matrix.dequantize_row(row, out);
                }
                all
            }
            _ => panic!("{shape:?}"),
        };
        (name, values)
    };
    names.into_iter().map(value).collect()
}

#[test]
fn any_part_leads_to_the_whole_model() {
    let folder = parts(|_| {});
    let one = load::open(&data("tiny/gguf-llama-q4_k/llama-q4_k.gguf")).expect("opens");
    for number in 1..=3 {
        let path = path(folder.path(), number, 3);
        let split = load::open(&path).expect("opens");
        assert_eq!(split.config, one.config);
        assert_eq!(values(&split), values(&one));
        assert_eq!(load::model_id(&path), "tiny");
    }
}

#[test]
fn a_model_with_rope_factors_in_a_later_part_has_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut file = whole("llama3-rope-f16");
    let at = file.tensors.iter().position(|tensor| tensor.name == "rope_freqs.weight").expect("is there");
    let factors = file.tensors.remove(at);
    file.tensors.insert(1, factors);
    write(folder.path(), &file.split(2));
    let files = load::open(&path(folder.path(), 1, 2)).expect("opens");
    assert_eq!(files.config["rope_freq_factors"].as_array().expect("factors").len(), 8);
}

#[test]
fn parts_that_do_not_belong_together_are_refused_by_name() {
    type Edit = Box<dyn Fn(&mut Vec<File>)>;
    let other = |number: usize, key: &'static str, value: u16| -> Edit {
        Box::new(move |parts| parts[number].set(key, value))
    };
    let cases: Vec<(Edit, &str)> = vec![
        (
            other(1, "split.no", 2),
            "tiny-00002-of-00003.gguf: says it is part 3 of 3; its name says otherwise",
        ),
        (other(1, "split.count", 4), "tiny-00002-of-00003.gguf: says it is part 2 of 4"),
        (other(2, "split.tensors.count", 9), "tiny-00003-of-00003.gguf: is a part of another model"),
        (
            Box::new(|parts| {
                let architecture = [&8u32.to_le_bytes()[..], &5u64.to_le_bytes(), b"qwen3"].concat();
                parts[1].values.push(("general.architecture".into(), architecture));
            }),
            "tiny-00002-of-00003.gguf: is a part of another model, of architecture",
        ),
        (
            Box::new(|parts| {
                let double = parts[0].tensors[0].clone();
                parts[2].tensors[0] = double;
            }),
            "tiny-00003-of-00003.gguf: tensor `",
        ),
        (
            Box::new(|parts| drop(parts[1].tensors.pop())),
            "tiny-00001-of-00003.gguf: promises 12 tensors; the 3 parts have 11",
        ),
        (
            Box::new(|parts| parts[1].values.retain(|(key, _)| key != "split.no")),
            "tiny-00002-of-00003.gguf: metadata `split.no` is missing",
        ),
    ];
    for (edit, words) in cases {
        let folder = parts(|parts| edit(parts));
        let error = load::open(&path(folder.path(), 1, 3)).expect_err("is refused").to_string();
        assert!(error.contains(words), "expected {words:?} in {error:?}");
    }
}

#[test]
fn a_part_that_is_missing_or_cut_is_refused_by_name() {
    let folder = parts(|_| {});
    let (first, second) = (path(folder.path(), 1, 3), path(folder.path(), 2, 3));
    let bytes = fs::read(&second).expect("reads");
    fs::write(&second, &bytes[..bytes.len() - 1000]).expect("writes");
    let error = load::open(&first).expect_err("is refused").to_string();
    assert!(error.contains("tiny-00002-of-00003.gguf: is cut short: tensor `"), "{error}");
    assert!(error.contains(": at least ") && error.contains(" bytes are missing"), "{error}");

    fs::remove_file(&second).expect("removes");
    let error = load::open(&first).expect_err("is refused");
    assert!(
        matches!(&error, LoadError::NotFound { message } if message.contains("is one of 3 parts; missing: ")
            && message.contains("tiny-00002-of-00003.gguf")),
        "{error}"
    );
}

#[test]
fn a_part_under_another_name_is_refused_with_the_name_it_needs() {
    let folder = parts(|_| {});
    for name in ["renamed.gguf", "tiny-00001-of-00002.gguf", "tiny-00002-of-00004.gguf"] {
        let renamed = folder.path().join(name);
        fs::copy(path(folder.path(), 2, 3), &renamed).expect("copies");
        let error = load::open(&renamed).expect_err("is refused").to_string();
        assert!(error.contains("its name does not end in -00002-of-00003.gguf"), "{error}");
    }
    // A name like a part's does not make one.
    let whole = folder.path().join("other-00001-of-00009.gguf");
    fs::copy(data("tiny/gguf-llama-q4_0/llama-q4_0.gguf"), &whole).expect("copies");
    assert!(load::open(&whole).is_ok());
}
