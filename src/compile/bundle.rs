//! Bundles: files with the compiled units of models, made ahead of time, which need no compiler and no writable disk.
//!
//! ```text
//! magic "OEQBUNDL" | version u32 | sections u32 | digest of the directory, 32 bytes
//! directory: for each section kind u32, flags u32, offset u64, length u64, digest 32 bytes, key 32 bytes
//! the sections' bytes, in any order
//! ```
//! Numbers are little-endian; offsets count from the beginning of the file. The directory is checked when a bundle is
//! opened, a section when it is used, so that opening a large bundle costs next to nothing. A section of a kind that is
//! not known is skipped, unless its flags say that the file means something else without it. The version changes only
//! when even this no longer holds.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::codec::{Reader, Stored};
use super::key::{Digest, Key, digest};
use crate::error::{Code, Error, Result};

const MAGIC: [u8; 8] = *b"OEQBUNDL";

/// The version that is written, and the highest that is read.
pub const VERSION: u32 = 1;

const HEADER: usize = 8 + 4 + 4 + 32;
const DIRECTORY_ENTRY: usize = 4 + 4 + 8 + 8 + 32 + 32;

/// A section that holds an image ([`super::codec`]).
const KIND_IMAGE: u32 = 1;
/// A section with the name and version of the program that wrote the bundle, as text.
const KIND_PRODUCER: u32 = 2;

/// Who does not know the section's kind must not use the bundle.
const FLAG_REQUIRED: u32 = 1;

#[derive(Debug, Clone, Copy)]
struct Section {
    kind: u32,
    flags: u32,
    offset: u64,
    length: u64,
    digest: Digest,
    key: Key,
}

/// An opened bundle.
pub struct Bundle {
    /// Where it came from, for messages.
    name: String,
    bytes: Box<[u8]>,
    sections: Vec<Section>,
    images: HashMap<Key, usize>,
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bundle").field("name", &self.name).field("images", &self.images.len()).finish_non_exhaustive()
    }
}

impl Bundle {
    /// Reads a bundle's file.
    ///
    /// # Errors
    /// `NOT_FOUND` if it cannot be read, `INVALID_ARGUMENT` if it is no bundle that this library understands.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = fs::read(path).map_err(|error| Error::new(Code::NotFound, format!("bundle {name}: {error}")))?;
        Self::from_bytes(name, bytes)
    }

    /// Takes a bundle's bytes; `name` is what messages call it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if they are no bundle that this library understands.
    pub fn from_bytes(name: impl Into<String>, bytes: impl Into<Box<[u8]>>) -> Result<Self> {
        let (name, bytes) = (name.into(), bytes.into());
        let sections = directory(&bytes).map_err(|error| error.context(format_args!("bundle {name}")))?;
        let mut images = HashMap::new();
        for (index, section) in sections.iter().enumerate() {
            if section.kind == KIND_IMAGE {
                images.entry(section.key).or_insert(index);
            }
        }
        Ok(Self { name, bytes, sections, images })
    }

    /// What messages call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many images it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// How many sections it has that this library does not know, and skips.
    #[must_use]
    pub fn unknown_sections(&self) -> usize {
        self.sections.iter().filter(|section| !matches!(section.kind, KIND_IMAGE | KIND_PRODUCER)).count()
    }

    /// Who wrote it.
    ///
    /// # Errors
    /// The section is damaged.
    pub fn producer(&self) -> Result<Option<String>> {
        let Some(section) = self.sections.iter().find(|section| section.kind == KIND_PRODUCER) else { return Ok(None) };
        Ok(Some(String::from_utf8_lossy(self.content(section)?).into_owned()))
    }

    /// The image of a unit, if the bundle has it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the section is damaged.
    pub fn find(&self, key: &Key) -> Result<Option<Stored>> {
        let Some(&index) = self.images.get(key) else { return Ok(None) };
        self.image(&self.sections[index]).map(Some)
    }

    /// Every image, in the order of the file.
    ///
    /// # Errors
    /// An item is an error where its section is damaged.
    pub fn images(&self) -> impl Iterator<Item = Result<Stored>> {
        self.sections.iter().filter(|section| section.kind == KIND_IMAGE).map(|section| self.image(section))
    }

    /// Checks every byte that a digest covers, unknown sections included.
    ///
    /// # Errors
    /// The first section that is damaged.
    pub fn verify(&self) -> Result<()> {
        for section in &self.sections {
            if section.kind == KIND_IMAGE {
                self.image(section)?;
            } else {
                self.content(section)?;
            }
        }
        Ok(())
    }

    fn content(&self, section: &Section) -> Result<&[u8]> {
        let range = range(section).and_then(|range| self.bytes.get(range));
        let content = range.ok_or_else(|| Error::invalid(format!("bundle {}: a section leads outside", self.name)))?;
        if digest(content) != section.digest {
            return Err(Error::invalid(format!(
                "bundle {}: the section at byte {} does not match its digest",
                self.name, section.offset
            )));
        }
        Ok(content)
    }

    fn image(&self, section: &Section) -> Result<Stored> {
        let place = || format!("bundle {}", self.name);
        let stored = Stored::decode(self.content(section)?).map_err(|error| error.context(place()))?;
        if stored.key != section.key {
            return Err(Error::invalid(format!("{}: the directory names another unit than the section", place())));
        }
        Ok(stored)
    }
}

fn range(section: &Section) -> Option<std::ops::Range<usize>> {
    let begin = usize::try_from(section.offset).ok()?;
    Some(begin..begin.checked_add(usize::try_from(section.length).ok()?)?)
}

fn directory(bytes: &[u8]) -> Result<Vec<Section>> {
    let mut reader = Reader(bytes);
    if reader.take(MAGIC.len()).ok() != Some(&MAGIC) {
        return Err(Error::invalid("this is not a bundle of compiled kernels (.oeqb)"));
    }
    let version = reader.u32()?;
    if version == 0 || version > VERSION {
        return Err(Error::invalid(format!(
            "it has version {version}; this library reads up to {VERSION}: use a newer oeq-native, or make the bundle with \
             this one"
        )));
    }
    let count = reader.u32()? as usize;
    let expected: Digest = reader.array()?;
    let entries = reader.take(count.saturating_mul(DIRECTORY_ENTRY))?;
    if digest(entries) != expected {
        return Err(Error::invalid("its directory does not match its digest"));
    }
    let mut sections = Vec::new();
    let mut reader = Reader(entries);
    for _ in 0..count {
        let (kind, flags, offset, length) = (reader.u32()?, reader.u32()?, reader.u64()?, reader.u64()?);
        let section = Section { kind, flags, offset, length, digest: reader.array()?, key: Key(reader.array()?) };
        if range(&section).is_none_or(|range| range.end > bytes.len()) {
            return Err(Error::invalid(format!(
                "it is truncated: a section ends at byte {}, the file at {}",
                offset.saturating_add(length),
                bytes.len()
            )));
        }
        if section.flags & FLAG_REQUIRED != 0 && !matches!(kind, KIND_IMAGE | KIND_PRODUCER) {
            return Err(Error::invalid(format!("it needs a section of kind {kind}, which this library does not know")));
        }
        sections.push(section);
    }
    Ok(sections)
}

/// Puts a bundle together.
#[derive(Debug, Default)]
pub struct Builder {
    images: BTreeMap<Key, Stored>,
}

impl Builder {
    /// Adds an image. False if the unit is there already; the first one stays.
    pub fn add(&mut self, stored: Stored) -> bool {
        let new = !self.images.contains_key(&stored.key);
        self.images.entry(stored.key).or_insert(stored);
        new
    }

    /// How many images there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// The bundle's bytes: the same images give the same bytes.
    #[must_use]
    pub fn build(&self) -> Vec<u8> {
        let producer = concat!("oeq-native ", env!("CARGO_PKG_VERSION")).as_bytes().to_vec();
        let mut parts = vec![(KIND_PRODUCER, Key([0; 32]), producer)];
        parts.extend(self.images.values().map(|stored| (KIND_IMAGE, stored.key, stored.encode())));
        assemble(&parts.iter().map(|(kind, key, body)| (*kind, 0, *key, body.as_slice())).collect::<Vec<_>>())
    }

    /// Writes the bundle's file: aside, then renamed, so that a reader never sees half of one.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let bytes = self.build();
        let mut aside = PathBuf::from(path).into_os_string();
        aside.push(format!(".new-{}", std::process::id()));
        fs::write(&aside, &bytes).and_then(|()| fs::rename(&aside, path)).map_err(|error| {
            let _ = fs::remove_file(&aside);
            Error::new(Code::ResourceExhausted, format!("writing bundle {}: {error}", path.display()))
        })?;
        Ok(bytes.len() as u64)
    }
}

fn assemble(parts: &[(u32, u32, Key, &[u8])]) -> Vec<u8> {
    let mut directory = Vec::with_capacity(parts.len() * DIRECTORY_ENTRY);
    let mut offset = (HEADER + parts.len() * DIRECTORY_ENTRY) as u64;
    for (kind, flags, key, body) in parts {
        directory.extend_from_slice(&kind.to_le_bytes());
        directory.extend_from_slice(&flags.to_le_bytes());
        directory.extend_from_slice(&offset.to_le_bytes());
        directory.extend_from_slice(&(body.len() as u64).to_le_bytes());
        directory.extend_from_slice(&digest(body));
        directory.extend_from_slice(&key.0);
        offset += body.len() as u64;
    }
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    // Far below 2^32: each section is kilobytes.
    out.extend_from_slice(&u32::try_from(parts.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(&digest(&directory));
    out.extend_from_slice(&directory);
    for (_, _, _, body) in parts {
        out.extend_from_slice(body);
    }
    out
}

/// Opens the bundles of a list of paths with colons between them.
///
/// # Errors
/// The first that cannot be opened.
pub fn open_list(list: &str) -> Result<Vec<Bundle>> {
    list.split(':').filter(|path| !path.is_empty()).map(|path| Bundle::open(Path::new(path))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;
    use crate::compile::codec::tests::stored;

    fn bundle() -> Vec<u8> {
        let mut builder = Builder::default();
        assert!((0..3).all(|number| builder.add(stored(number))));
        assert!(!builder.add(stored(1)));
        builder.build()
    }

    fn read(bytes: &[u8]) -> Result<Bundle> {
        Bundle::from_bytes("test", bytes)
    }

    #[test]
    fn what_is_put_in_is_found_and_nothing_else() {
        let bundle = read(&bundle()).unwrap();
        assert_eq!((bundle.len(), bundle.unknown_sections()), (3, 0));
        assert_eq!(bundle.find(&stored(2).key).unwrap(), Some(stored(2)));
        assert_eq!(bundle.find(&stored(7).key).unwrap(), None);
        assert!(bundle.producer().unwrap().unwrap().starts_with("oeq-native "));
        assert_eq!(bundle.images().map(|image| image.unwrap().target).collect::<Vec<_>>(), ["sm_90"; 3]);
        bundle.verify().unwrap();
    }

    #[test]
    fn the_order_of_adding_does_not_show() {
        let mut backwards = Builder::default();
        assert!((0..3).rev().all(|number| backwards.add(stored(number))));
        assert_eq!(backwards.build(), bundle());
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_found() {
        let bytes = bundle();
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "{length}");
        }
        for place in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[place] ^= 1 << (place % 8);
            let found = read(&flipped).and_then(|bundle| bundle.verify());
            assert!(found.is_err(), "byte {place}");
        }
    }

    #[test]
    fn a_damaged_image_is_an_error_and_the_others_are_not() {
        let mut bytes = bundle();
        *bytes.last_mut().unwrap() ^= 1;
        let bundle = read(&bytes).unwrap();
        let good = (0..3).filter(|number| bundle.find(&stored(*number).key).is_ok()).count();
        assert_eq!(good, 2);
        let error = bundle.verify().unwrap_err();
        assert!(error.message().contains("bundle test") && error.message().contains("digest"), "{error}");
    }

    #[test]
    fn unknown_sections_are_skipped_unless_they_are_required() {
        let body = stored(1).encode();
        let parts = |flags| [(77, flags, Key([1; 32]), b"later".as_slice()), (KIND_IMAGE, 0, stored(1).key, &body)];
        let bundle = read(&assemble(&parts(0))).unwrap();
        assert_eq!((bundle.len(), bundle.unknown_sections()), (1, 1));
        assert_eq!(bundle.find(&stored(1).key).unwrap(), Some(stored(1)));
        bundle.verify().unwrap();
        let error = read(&assemble(&parts(FLAG_REQUIRED))).unwrap_err();
        assert!(error.message().contains("kind 77"), "{error}");
        // Bits that later versions may use do no harm.
        assert!(read(&assemble(&parts(1 << 9))).is_ok());
    }

    #[test]
    fn what_is_no_bundle_or_a_newer_one_says_so() {
        assert!(read(b"{}").unwrap_err().message().contains("not a bundle"));
        let mut newer = bundle();
        newer[8] = 2;
        assert!(read(&newer).unwrap_err().message().contains("version 2"), "{:?}", read(&newer));
        let error = Bundle::open(Path::new("/nonesuch.oeqb")).unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.message().contains("/nonesuch.oeqb"));
        assert!(open_list("").unwrap().is_empty());
    }
}
