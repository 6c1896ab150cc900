//! Which files of a repository are wanted.
//!
//! A repository often holds the same weights several times: for other programs, or in a dozen quantisations.
//! One form is taken, and where it is not plain which, the choice is the user's.

use std::collections::BTreeMap;

use super::{HubError, HubId, Variant};
use crate::model::load::PartName;

/// The text side and settings of a model folder.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
];
/// Further templates of a folder.
const TEMPLATES: &str = "additional_chat_templates/";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Most parts of a model.
const MAX_PARTS: u64 = 4096;

/// A file of a repository, with its size where that is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Listed {
    pub name: String,
    pub size: Option<u64>,
}

/// What was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    /// Files of a model folder.
    Folder(Vec<String>),
    /// The shards of one GGUF model, in order.
    Gguf(Vec<String>),
    /// Whatever the patterns matched.
    Patterns(Vec<String>),
}

impl Choice {
    pub fn names(&self) -> &[String] {
        match self {
            Self::Folder(names) | Self::Gguf(names) | Self::Patterns(names) => names,
        }
    }
}

/// Chooses for a pull.
pub(super) fn choose(id: &HubId, files: &[Listed], patterns: &[String]) -> Result<Choice, HubError> {
    if !patterns.is_empty() {
        return by_patterns(id, files, patterns);
    }
    if id.variant.is_none() {
        let folder = folder(files);
        if !folder.is_empty() {
            return Ok(Choice::Folder(folder));
        }
    }
    let groups = gguf_groups(files);
    let asked = id.variant.as_deref();
    let found: Vec<&Group> = match asked {
        Some(asked) => groups.iter().filter(|group| group.label.eq_ignore_ascii_case(asked)).collect(),
        None => groups.iter().collect(),
    };
    match found.as_slice() {
        [one] => whole(id, one),
        [] if groups.is_empty() && asked.is_none() => Err(HubError::NothingUsable {
            repo: id.repo.clone(),
            found: files.iter().map(|file| file.name.clone()).take(12).collect(),
        }),
        [] => Err(HubError::NoVariant {
            repo: id.repo.clone(),
            asked: asked.unwrap_or_default().to_owned(),
            variants: groups.iter().map(Group::variant).collect(),
        }),
        several => Err(HubError::Choose {
            repo: id.repo.clone(),
            variants: several.iter().map(|group| group.variant()).collect(),
        }),
    }
}

/// All parts of one model, which the repository must hold.
fn whole(id: &HubId, group: &Group) -> Result<Choice, HubError> {
    let missing: Vec<String> =
        group.expected().into_iter().filter(|name| !group.names.contains(name)).collect();
    match missing.is_empty() {
        true => Ok(Choice::Gguf(group.names.clone())),
        false => Err(HubError::PartsMissing { repo: id.repo.clone(), missing }),
    }
}

fn by_patterns(id: &HubId, files: &[Listed], patterns: &[String]) -> Result<Choice, HubError> {
    for pattern in patterns {
        if !files.iter().any(|file| matches(pattern, &file.name)) {
            return Err(HubError::NoMatch {
                repo: id.repo.clone(),
                pattern: pattern.clone(),
                found: files.iter().map(|file| file.name.clone()).take(40).collect(),
            });
        }
    }
    let wanted = |name: &str| patterns.iter().any(|pattern| matches(pattern, name));
    Ok(Choice::Patterns(files.iter().map(|file| file.name.clone()).filter(|name| wanted(name)).collect()))
}

/// Files of a model folder: text side and safetensors; empty where there are no such weights.
pub(super) fn folder(files: &[Listed]) -> Vec<String> {
    let at_root = |name: &str| name.ends_with(".safetensors") && !name.contains('/');
    // Some repositories hold the author's own single file besides.
    let standard = |name: &str| at_root(name) && (name == "model.safetensors" || is_shard(name));
    let has_standard = files.iter().any(|file| standard(&file.name));
    let is_weight = |name: &str| if has_standard { standard(name) } else { at_root(name) };
    if !files.iter().any(|file| is_weight(&file.name)) {
        return Vec::new();
    }
    let is_companion = |name: &str| {
        COMPANIONS.contains(&name)
            || name
                .strip_prefix(TEMPLATES)
                .is_some_and(|rest| rest.ends_with(".jinja") && !rest.contains('/'))
    };
    let mut names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
    names.retain(|name| is_companion(name) || is_weight(name));
    names
}

fn is_shard(name: &str) -> bool {
    part_name(name).is_some_and(|part| (part.stem, part.extension) == ("model", "safetensors"))
}

/// One GGUF model of a repository: a file, or all its shards.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// As `Q4_K_M`; the name where it says none.
    pub label: String,
    pub names: Vec<String>,
    pub size: Option<u64>,
    /// How many shards there should be.
    pub count: usize,
}

impl Group {
    pub fn variant(&self) -> Variant {
        Variant { name: self.label.clone(), bytes: self.size }
    }

    /// The shards' names as they should be.
    pub fn expected(&self) -> Vec<String> {
        let Some(first) = self.names.first() else { return Vec::new() };
        match part_name(first) {
            None => vec![first.clone()],
            Some(part) => (1..=part.count).map(|number| part.part(number)).collect(),
        }
    }
}

/// The GGUF models of a repository, without what only accompanies one.
pub(super) fn gguf_groups(files: &[Listed]) -> Vec<Group> {
    let mut groups: BTreeMap<&str, Group> = BTreeMap::new();
    for file in files {
        let Some(stem) = file.name.strip_suffix(".gguf") else { continue };
        let base = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
        if base.starts_with("mmproj") || base.contains("imatrix") {
            continue;
        }
        let (key, count) = part_name(&file.name).map_or((stem, 1), |part| (part.stem, part.count as usize));
        let group = groups.entry(key).or_insert_with(|| Group {
            label: label(key),
            names: Vec::new(),
            size: Some(0),
            count,
        });
        group.names.push(file.name.clone());
        group.size = group.size.zip(file.size).map(|(sum, size)| sum.saturating_add(size));
    }
    let mut groups: Vec<Group> = groups.into_values().collect();
    groups.iter_mut().for_each(|group| group.names.sort());
    name_apart(&mut groups);
    groups
}

/// Several models of one quantisation go by their files' names.
fn name_apart(groups: &mut [Group]) {
    let labels: Vec<String> = groups.iter().map(|group| group.label.to_ascii_lowercase()).collect();
    for (at, group) in groups.iter_mut().enumerate() {
        let is_shared = labels.iter().filter(|label| **label == labels[at]).count() > 1;
        if let (true, Some(first)) = (is_shared, group.names.first()) {
            let whole = first.strip_suffix(".gguf").unwrap_or(first);
            let stem = part_name(first).map_or(whole, |part| part.stem);
            group.label = stem.rsplit('/').next().unwrap_or(stem).to_owned();
        }
    }
}

/// A part's name whose numbers make sense.
fn part_name(name: &str) -> Option<PartName<'_>> {
    PartName::parse(name).filter(|part| (1..=part.count).contains(&part.number) && part.count <= MAX_PARTS)
}

/// The quantisation that a file's name ends with; the name itself where it says none.
fn label(stem: &str) -> String {
    let base = stem.rsplit('/').next().unwrap_or(stem);
    let mut cuts: Vec<usize> = base.match_indices(['-', '.']).map(|(at, _)| at + 1).collect();
    cuts.push(0);
    cuts.sort_unstable();
    for at in cuts {
        let tail = &base[at..];
        if is_quantisation(tail.strip_prefix("UD-").unwrap_or(tail)) {
            return tail.to_owned();
        }
    }
    base.to_owned()
}

/// `Q4_K_M`, `IQ2_XXS`, `F16`, `MXFP4_MOE` and their like.
fn is_quantisation(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    let plain = upper.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let numbered = |prefix: &str| {
        upper.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    plain
        && (["Q", "IQ", "TQ", "MXFP"].iter().any(|prefix| numbered(prefix))
            || matches!(&*upper, "F16" | "F32" | "BF16" | "FP16"))
}

/// Whether a name fits a pattern of `*` (anything) and `?` (one character).
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            // What did not fit is given to the last star.
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    p = at + 1;
                    n = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(names: &[&str]) -> Vec<Listed> {
        names.iter().map(|name| Listed { name: (*name).to_owned(), size: Some(1000) }).collect()
    }

    fn id(text: &str) -> HubId {
        HubId::parse(text).expect("a good id")
    }

    #[test]
    fn a_folder_is_its_text_side_and_one_form_of_the_weights() {
        let files = listed(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "onnx/decoder.safetensors",
            "consolidated.safetensors",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.fp16.safetensors",
            "additional_chat_templates/tool_use.jinja",
            "flax_model.msgpack",
        ]);
        let Choice::Folder(names) = choose(&id("a/b"), &files, &[]).expect("a folder") else {
            panic!("a folder")
        };
        assert_eq!(
            names,
            [
                "config.json",
                "tokenizer.json",
                "chat_template.jinja",
                "model.safetensors.index.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "additional_chat_templates/tool_use.jinja",
            ]
        );
    }

    #[test]
    fn of_several_quantisations_one_must_be_named() {
        let files = listed(&[
            "m-Q4_K_M.gguf",
            "m-Q8_0.gguf",
            "mmproj-m-f16.gguf",
            "m.imatrix.gguf",
            "m-UD-Q4_K_XL.gguf",
            "README.md",
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            "model.safetensors",
        ]);
        let pick = |text: &str| choose(&id(text), &files, &[]).map(|choice| choice.names().to_vec());
        assert_eq!(pick("a/b:q4_k_m").expect("one"), ["m-Q4_K_M.gguf"]);
        assert_eq!(pick("a/b:UD-Q4_K_XL").expect("one"), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(
            pick("a/b:BF16").expect("shards"),
            ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]
        );
        assert_eq!(pick("a/b").expect("the folder"), ["model.safetensors"]);
        let error = pick("a/b:Q2_K").expect_err("not there").to_string();
        assert!(error.contains("Q2_K") && error.contains("Q8_0") && error.contains("2.0 KiB"), "{error}");
        let error = choose(&id("a/b"), &files[..5], &[]).expect_err("several").to_string();
        assert!(
            error.contains("a/b:Q4_K_M") && error.contains("UD-Q4_K_XL") && !error.contains("mmproj"),
            "{error}"
        );
        assert_eq!(choose(&id("a/b"), &files[1..3], &[]).expect("the only one").names(), ["m-Q8_0.gguf"]);
    }

    #[test]
    fn patterns_take_what_they_match_and_nothing_is_an_error() {
        let files = listed(&["a.json", "sub/b.json", "c.bin"]);
        let take = |patterns: &[&str]| {
            let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
            choose(&id("a/b"), &files, &patterns).map(|choice| choice.names().to_vec())
        };
        assert_eq!(take(&["*.json"]).expect("two"), ["a.json", "sub/b.json"]);
        assert_eq!(take(&["?.bin", "a.*"]).expect("two"), ["a.json", "c.bin"]);
        assert!(take(&["*.json", "*.gguf"]).expect_err("none").to_string().contains("*.gguf"));
    }

    proptest::proptest! {
        #[test]
        fn a_name_with_parts_replaced_by_stars_still_fits(name in "[a-c/.]{0,12}", cut in 0usize..12, len in 0usize..6) {
            let from = cut.min(name.len());
            let to = (from + len).min(name.len());
            let pattern = format!("{}*{}", &name[..from], &name[to..]);
            proptest::prop_assert!(matches(&pattern, &name));
            let longer = pattern + "z";
            proptest::prop_assert!(!matches(&longer, &name));
        }
    }
}
