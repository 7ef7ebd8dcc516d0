//! The matrix against a list of rows.

use penstock_policy_api::Matrix;
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Push(Vec<u64>),
    SwapRemove(usize),
    Set(usize, usize, u64),
    Clear,
    Reset(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => vec(any::<u64>(), 0..5).prop_map(Step::Push),
        2 => (0..20usize).prop_map(Step::SwapRemove),
        3 => (0..20usize, 0..4usize, any::<u64>()).prop_map(|(row, name, value)| Step::Set(row, name, value)),
        1 => Just(Step::Clear),
        1 => (0..12usize).prop_map(Step::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_matrix_is_a_list_of_rows_by_columns(steps in vec(step(), 0..40), names in 0..4usize, room in 0..10usize) {
        let mut matrix = Matrix::with_capacity(names, room);
        let mut rows: Vec<Vec<u64>> = Vec::new();
        for step in steps {
            match step {
                Step::Push(values) => {
                    prop_assert_eq!(matrix.push_row(&values), rows.len());
                    rows.push((0..names).map(|name| values.get(name).copied().unwrap_or(0)).collect());
                }
                Step::SwapRemove(row) => {
                    matrix.swap_remove_row(row);
                    if row < rows.len() {
                        rows.swap_remove(row);
                    }
                }
                Step::Set(row, name, value) => {
                    matrix.set(row, name, value);
                    if let Some(cell) = rows.get_mut(row).and_then(|row| row.get_mut(name)) {
                        *cell = value;
                    }
                }
                Step::Clear => {
                    matrix.clear_rows();
                    rows.clear();
                }
                Step::Reset(count) => {
                    matrix.reset(names, count);
                    rows = vec![vec![0; names]; count];
                }
            }
            prop_assert_eq!((matrix.rows(), matrix.names()), (rows.len(), names));
            let columns: Vec<u64> = (0..names).flat_map(|name| rows.iter().map(move |row| row[name])).collect();
            let mut packed = Vec::new();
            matrix.pack_into(&mut packed);
            prop_assert_eq!(&packed, &columns);
            prop_assert!(matrix.packed().is_none_or(|cells| cells == columns));
        }
    }
}

#[test]
fn outside_reads_zero_and_writes_nothing() {
    let mut matrix = Matrix::new(2);
    matrix.push_row(&[1, 2, 3]);
    matrix.set(1, 0, 9);
    matrix.set(0, 2, 9);
    matrix.swap_remove_row(1);
    assert_eq!((matrix.get(0, 1), matrix.get(1, 0), matrix.get(0, 2), matrix.column(2)), (2, 0, 0, &[][..]));
}
