//! How does a policy read a value? Views over the values of a call, with one accessor a signal; the generated tables fill them in.

use penstock_policy_api::Matrix;

/// The rows of a call, column by column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cells<'a> {
    pub(crate) cells: &'a [u64],
    /// Distance between two columns.
    pub(crate) stride: usize,
    pub(crate) rows: usize,
}

impl<'a> Cells<'a> {
    pub(crate) fn of(matrix: &'a Matrix) -> Self {
        let (cells, stride) = matrix.strided();
        Self { cells, stride, rows: matrix.rows() }
    }

    /// One value; 0 outside, which a host that keeps the contract never asks for.
    #[inline(always)]
    pub(crate) fn get(&self, position: usize, row: usize) -> u64 {
        self.cells.get(position.wrapping_mul(self.stride).wrapping_add(row)).copied().unwrap_or(0)
    }
}

/// Defines the marker of a row table, the view of its rows and the view of one row.
macro_rules! row_view {
    ($(#[$doc:meta])* $table:ident $rows:ident $row:ident $name:literal
     { $($(#[$about:meta])* $index:literal $wall:literal $get:ident $try_get:ident;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $table {}

        impl $crate::Table for $table {
            const NAME: &'static str = $name;
            const NAMES: &'static [&'static str] = &[$($wall),*];
        }

        #[doc = concat!("The candidates of a call: rows of table `", $name, "`, as `D` declares them.")]
        #[derive(Debug)]
        pub struct $rows<'a, D> {
            cells: $crate::view::Cells<'a>,
            declared: core::marker::PhantomData<fn() -> D>,
        }

        impl<D> Clone for $rows<'_, D> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<D> Copy for $rows<'_, D> {}

        impl<'a, D: $crate::Declares<$table>> $rows<'a, D> {
            /// Reads a matrix whose columns are those of `D`.
            pub fn new(matrix: &'a penstock_policy_api::Matrix) -> Self {
                Self { cells: $crate::view::Cells::of(matrix), declared: core::marker::PhantomData }
            }

            /// Number of candidates.
            #[allow(clippy::len_without_is_empty, reason = "is_empty follows")]
            pub fn len(self) -> usize {
                self.cells.rows
            }

            /// No candidate?
            pub fn is_empty(self) -> bool {
                self.cells.rows == 0
            }

            /// The candidate of that index; one outside reads as zeros.
            pub fn row(self, index: usize) -> $row<'a, D> {
                $row { cells: self.cells, index, declared: core::marker::PhantomData }
            }

            /// Every candidate, in host order.
            pub fn iter(self) -> impl ExactSizeIterator<Item = $row<'a, D>> + DoubleEndedIterator + Clone {
                (0..self.cells.rows).map(move |index| self.row(index))
            }
        }

        #[doc = concat!("One candidate: a row of table `", $name, "`.")]
        #[derive(Debug)]
        pub struct $row<'a, D> {
            cells: $crate::view::Cells<'a>,
            index: usize,
            declared: core::marker::PhantomData<fn() -> D>,
        }

        impl<D> Clone for $row<'_, D> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<D> Copy for $row<'_, D> {}

        impl<D: $crate::Declares<$table>> $row<'_, D> {
            /// The candidate's only name: what a proposal says.
            pub fn index(self) -> u32 {
                self.index as u32
            }

            #[inline(always)]
            fn is_known(self, position: usize) -> bool {
                let mask = self.cells.get(const { D::POSITIONS.mask(MASK) }, self.index);
                mask >> position & 1 == 1
            }

            $(
                $(#[$about])*
                #[inline(always)]
                pub fn $get(self) -> u64 {
                    self.cells.get(const { D::POSITIONS.of($index) }, self.index)
                }

                #[doc = concat!("As [`Self::", stringify!($get), "`]; none where it is unknown.")]
                #[inline(always)]
                pub fn $try_get(self) -> Option<u64> {
                    self.is_known(const { D::POSITIONS.of($index) }).then(|| self.$get())
                }
            )*
        }

        const MASK: usize = $crate::view::index_of_mask(<$table as $crate::Table>::NAMES);
    };
}
pub(crate) use row_view;

/// Defines the marker of a context table and the view of its values.
macro_rules! context_view {
    ($(#[$doc:meta])* $table:ident $context:ident $name:literal
     { $($(#[$about:meta])* $index:literal $wall:literal $get:ident $try_get:ident;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $table {}

        impl $crate::Table for $table {
            const NAME: &'static str = $name;
            const NAMES: &'static [&'static str] = &[$($wall),*];
        }

        #[doc = concat!("Values of table `", $name, "` and of the common table, as `D` declares them.")]
        #[derive(Debug)]
        pub struct $context<'a, D> {
            values: &'a [u64],
            declared: core::marker::PhantomData<fn() -> D>,
        }

        impl<D> Clone for $context<'_, D> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<D> Copy for $context<'_, D> {}

        impl<'a, D: $crate::Declares<$table>> $context<'a, D> {
            /// Reads values that stand in the order of `D`.
            pub fn new(values: &'a [u64]) -> Self {
                Self { values, declared: core::marker::PhantomData }
            }

            #[inline(always)]
            fn get(self, position: usize) -> u64 {
                self.values.get(position).copied().unwrap_or(0)
            }

            #[inline(always)]
            fn is_known(self, position: usize) -> bool {
                self.get(const { D::POSITIONS.mask(MASK) }) >> position & 1 == 1
            }

            $(
                $(#[$about])*
                #[inline(always)]
                pub fn $get(self) -> u64 {
                    self.get(const { D::POSITIONS.of($index) })
                }

                #[doc = concat!("As [`Self::", stringify!($get), "`]; none where it is unknown.")]
                #[inline(always)]
                pub fn $try_get(self) -> Option<u64> {
                    self.is_known(const { D::POSITIONS.of($index) }).then(|| self.$get())
                }
            )*
        }

        const MASK: usize = $crate::view::index_of_mask(<$table as $crate::Table>::NAMES);
    };
}
pub(crate) use context_view;

/// Index of `known-mask` among a table's names.
pub(crate) const fn index_of_mask(names: &[&str]) -> usize {
    let mut at = 0;
    while at < names.len() {
        let name = names[at].as_bytes();
        // No other name of a table ends in "mask".
        if name.len() == 10 && name[0] == b'k' && name[6] == b'm' && name[9] == b'k' {
            return at;
        }
        at += 1;
    }
    panic!("every table side offers known-mask");
}

#[cfg(test)]
mod tests {
    use penstock_policy_api::Matrix;

    use crate::tables::{ReplicaRows, RoutingContext};

    crate::declare! {
        Seen: Replica = ["overlap-blocks", "known-mask", "replica-id"];
        Asked: Routing = ["need-blocks", "block-size-tokens", "known-mask"];
    }

    #[test]
    fn an_accessor_reads_the_column_of_its_name() {
        let mut matrix = Matrix::new(3);
        matrix.push_row(&[40, 0b111, 1]);
        matrix.push_row(&[0, 0b110, 2]);
        let rows = ReplicaRows::<Seen>::new(&matrix);
        let seen: Vec<_> = rows.iter().map(|row| (row.index(), row.replica_id(), row.try_overlap_blocks())).collect();
        assert_eq!(seen, [(0, 1, Some(40)), (1, 2, None)]);
        assert_eq!(rows.row(1).overlap_blocks(), 0, "an unknown value reads as its fill");
    }

    #[test]
    fn a_context_offers_the_common_names() {
        let context = RoutingContext::<Asked>::new(&[7, 16, 0b101]);
        assert_eq!((context.need_blocks(), context.block_size_tokens()), (7, 16));
        assert_eq!((context.try_need_blocks(), context.try_block_size_tokens()), (Some(7), None));
    }
}
