//! Answers in the canonical ABI, by hand: those that cannot stand, and none at all. An answer lies at address 1,024, a list of it at 2,048.

const ANSWER: &str = "(i32.const 1024)";

fn byte(at: u32, value: u32) -> String {
    format!("(i32.store8 (i32.const {at}) (i32.const {value}))")
}

fn word(at: u32, value: u32) -> String {
    format!("(i32.store (i32.const {at}) (i32.const {}))", value as i32)
}

fn long(at: u32, value: u64) -> String {
    format!("(i64.store (i32.const {at}) (i64.const {}))", value as i64)
}

fn answer(stores: &[String]) -> String {
    format!("{} {ANSWER}", stores.concat())
}

/// Leaves it to the native default.
pub fn no_opinion(decision: &str) -> String {
    match decision {
        "fairness" => answer(&[long(1_024, 0), byte(1_032, 0), word(1_036, u32::MAX)]),
        _ => answer(&[long(1_024, 0)]),
    }
}

/// An answer whose list lies at `at` and has so many items.
pub fn list_at(decision: &str, at: u32, items: u32) -> String {
    match decision {
        // Admission answers no lists: an answer that ends outside stands for one.
        "admission" => format!("(i32.const {})", 0x7fff_fff0_u32),
        "routing" => answer(&[byte(1_024, 1), word(1_028, at), word(1_032, items), long(1_036, 0)]),
        "overload" => answer(&[byte(1_024, 1), byte(1_028, 0), word(1_032, 1), word(1_036, at), word(1_040, items)]),
        _ => answer(&[word(1_024, at), word(1_028, items), byte(1_032, 0), word(1_036, u32::MAX)]),
    }
}

/// A variant's case that does not exist.
pub fn unknown_case(decision: &str) -> Option<String> {
    match decision {
        "eviction" => None,
        "fairness" => Some(answer(&[long(1_024, 0), byte(1_032, 9), word(1_036, u32::MAX)])),
        _ => Some(answer(&[byte(1_024, 9), long(1_028, 0)])),
    }
}

/// An answer that cannot stand: its name, words of the reason, its body.
type Nonsense = (&'static str, &'static [&'static str], String);

/// Well-formed to the engine, nonsense to the contract; of fairness for `order`.
pub fn malformed(decision: &str) -> Vec<Nonsense> {
    let rows = |rows: &[u32]| -> String {
        rows.iter().enumerate().map(|(at, row)| word(2_048 + 4 * at as u32, *row)).collect()
    };
    match decision {
        "admission" => vec![
            (
                "reserves-more-than-the-cap",
                &["reserve-above-cap"],
                answer(&[byte(1_024, 1), word(1_028, u32::MAX), byte(1_032, 0)]),
            ),
            ("raises-the-class", &["class-raised"], answer(&[byte(1_024, 1), word(1_028, 0), byte(1_032, 7)])),
            (
                "names-a-class-that-is-not",
                &["class-out-of-range"],
                answer(&[byte(1_024, 1), word(1_028, 0), byte(1_032, 200)]),
            ),
            ("defers-for-an-hour", &["defer-out-of-range"], answer(&[byte(1_024, 2), word(1_028, 3_600_000_000)])),
            (
                "degrades-to-nothing",
                &["may-not-degrade"],
                answer(&[byte(1_024, 3), word(1_028, 0), word(1_032, 0), byte(1_036, 0)]),
            ),
            (
                "refuses-for-a-reason-that-is-not",
                &["unknown-reason"],
                answer(&[byte(1_024, 4), word(1_028, 999), word(1_032, 0)]),
            ),
        ],
        "routing" => vec![
            (
                "ranks-a-row-that-is-not",
                &["row-out-of-range"],
                format!("{}{}", rows(&[4_000_000]), list_at(decision, 2_048, 1)),
            ),
            ("ranks-a-row-twice", &["row-twice"], format!("{}{}", rows(&[0, 0]), list_at(decision, 2_048, 2))),
            (
                "ranks-nine-rows",
                &["too-many-rows"],
                format!("{}{}", rows(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), list_at(decision, 2_048, 9)),
            ),
            ("holds-for-no-time", &["hold-out-of-range"], answer(&[byte(1_024, 2), word(1_028, 0)])),
        ],
        "fairness" => vec![
            (
                "ranks-a-row-that-is-not",
                &["row-out-of-range"],
                format!("{}{}", rows(&[4_000_000]), list_at(decision, 2_048, 1)),
            ),
            ("ranks-a-row-twice", &["row-twice"], format!("{}{}", rows(&[0, 0]), list_at(decision, 2_048, 2))),
            (
                "wants-rounds-of-no-time",
                &["target-out-of-range"],
                answer(&[long(1_024, 0), byte(1_032, 0), word(1_036, 0)]),
            ),
        ],
        "eviction" => {
            let worth = |at: u32, to: u32| format!("{}{}", long(at, 7), byte(at + 8, to));
            vec![
                // A thousand prices, whatever the number of rows.
                ("prices-too-many", &["wrong-count"], list_at(decision, 4_096, 1_000)),
                (
                    "sends-to-a-tier-that-is-not",
                    &["unknown-tier"],
                    // As many as there are rows, the first to nowhere.
                    format!(
                        "{}{} (i32.store (i32.const 1028) (local.get 5)) {ANSWER}",
                        worth(2_048, 9),
                        word(1_024, 2_048)
                    ),
                ),
            ]
        }
        _ => {
            let action =
                |what: u32, class: u32| format!("{}{}{}", word(2_048, what), byte(2_050, class), long(2_056, 1));
            let stance = |level: u32, hold: u32, items: u32| {
                let list = [word(1_036, 2_048), word(1_040, items)].concat();
                answer(&[byte(1_024, 1), byte(1_028, level), word(1_032, hold), list])
            };
            vec![
                ("climbs-above-the-ladder", &["level-out-of-range"], stance(5, 1_000_000, 0)),
                ("orders-what-is-not", &["unknown-action"], format!("{}{}", action(999, 0), stance(1, 1_000_000, 1))),
                (
                    "orders-what-it-did-not-declare",
                    &["unknown-action"],
                    format!("{}{}", action(8, 7), stance(1, 1_000_000, 1)),
                ),
                ("orders-seventeen-things", &["too-many-actions"], stance(1, 1_000_000, 17)),
            ]
        }
    }
}
