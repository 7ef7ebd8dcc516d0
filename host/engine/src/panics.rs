//! Where did a thread of this process panic, without what it said? A panic's words may quote what a client sent (a slice of a string that
//! is cut inside a character says the string), so neither the log nor the terminal gets them: the place in the source is enough to find it.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::Once;

/// Threads whose name begins so are ours.
const OURS: &str = "penstock";

thread_local! {
    /// Where this thread panicked last.
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// From now on panics of threads that are named for this product leave their place and not their words. Other threads are left alone.
/// Idempotent.
pub(crate) fn keep_words_to_ourselves() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            match thread.name().filter(|name| name.starts_with(OURS)) {
                Some(name) => {
                    let place = place_of(info);
                    eprintln!("{}", line(name, &place));
                    // The thread may be ending, and its storage gone.
                    let _ = PLACE.try_with(|last| last.replace(place));
                }
                None => others(info),
            }
        }));
    });
}

/// Where this thread panicked last: file, line and column.
pub(crate) fn last_place() -> String {
    PLACE.with(|last| {
        let last = last.borrow();
        if last.is_empty() { "an unknown place".into() } else { last.clone() }
    })
}

fn place_of(info: &PanicHookInfo<'_>) -> String {
    info.location().map(ToString::to_string).unwrap_or_default()
}

fn line(thread: &str, place: &str) -> String {
    format!("thread '{thread}' panicked at {place}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_ours_leaves_its_place_and_not_its_words() {
        keep_words_to_ourselves();
        keep_words_to_ourselves();
        let panics = || {
            // What a slice of a string says when it is cut inside a character.
            let asked = "my secr\u{e9}t question".to_string();
            let caught = std::panic::catch_unwind(|| asked[..8].len());
            assert!(caught.is_err());
            last_place()
        };
        let thread = std::thread::Builder::new().name("penstock-test".into()).spawn(panics).unwrap();
        let place = thread.join().unwrap();
        assert!(place.contains("panics.rs:"), "{place}");
        let said = line("penstock-test", &place);
        assert!(said.starts_with("thread 'penstock-test' panicked at ") && !said.contains("secr"), "{said}");
    }

    #[test]
    fn a_thread_that_never_panicked_says_so() {
        assert_eq!(std::thread::spawn(last_place).join().unwrap(), "an unknown place");
    }
}
