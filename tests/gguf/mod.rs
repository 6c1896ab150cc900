//! GGUF files taken apart and put together, by a reader and writer of the tests' own.
#![allow(clippy::expect_used, dead_code, reason = "tests fail by panicking; each program uses a part")]

/// A tensor of a file, with its bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Innermost first.
    pub dims: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
}

/// A file in parts.
#[derive(Clone, Default)]
pub struct File {
    /// Key and value with its type, as bytes.
    pub values: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

struct Cursor<'a>(&'a [u8], usize);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        self.1 += len;
        &self.0[self.1 - len..self.1]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight"))
    }

    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).expect("UTF-8")
    }

    fn skip(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            10..=12 => drop(self.take(8)),
            8 => drop(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip(kind));
            }
            other => panic!("type {other}"),
        }
    }
}

impl File {
    /// Takes a file apart; tensors must lie in order.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut cursor = Cursor(bytes, 8);
        let (tensors, values) = (cursor.u64(), cursor.u64());
        let mut file = Self::default();
        for _ in 0..values {
            let key = cursor.text();
            let start = cursor.1;
            let kind = cursor.u32();
            cursor.skip(kind);
            file.values.push((key, bytes[start..cursor.1].to_vec()));
        }
        let mut infos = Vec::new();
        for _ in 0..tensors {
            let name = cursor.text();
            let count = cursor.u32();
            let dims: Vec<u64> = (0..count).map(|_| cursor.u64()).collect();
            infos.push((name, dims, cursor.u32(), cursor.u64() as usize));
        }
        let data = &bytes[cursor.1.next_multiple_of(32)..];
        let ends: Vec<usize> = infos.iter().skip(1).map(|info| info.3).chain([data.len()]).collect();
        for ((name, dims, kind, start), end) in infos.into_iter().zip(ends) {
            file.tensors.push(Tensor { name, dims, kind, data: data[start..end].to_vec() });
        }
        file
    }

    /// Sets a number, as U16 like the splitter of others.
    pub fn set(&mut self, key: &str, value: u16) {
        self.values.retain(|(other, _)| other != key);
        self.values.push((key.into(), [&2u32.to_le_bytes()[..], &value.to_le_bytes()].concat()));
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            bytes.extend(text(key));
            bytes.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }

    /// The same model in parts: tensors dealt out in turn, other metadata in the first alone.
    pub fn split(&self, count: u16) -> Vec<Self> {
        let parts = (0..count).map(|number| {
            let mine = |(index, tensor): (usize, &Tensor)| {
                (index % usize::from(count) == usize::from(number)).then(|| tensor.clone())
            };
            let mut part = Self {
                values: if number == 0 { self.values.clone() } else { Vec::new() },
                tensors: self.tensors.iter().enumerate().filter_map(mine).collect(),
            };
            part.set("split.no", number);
            part.set("split.count", count);
            part.set("split.tensors.count", self.tensors.len() as u16);
            part
        });
        parts.collect()
    }
}
