//! Values in the order a policy declared them: one list for the context, one column-major matrix for the candidates.

use alloc::vec::Vec;

/// Context values, in declared order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context<'a> {
    /// One value a declared name.
    pub values: &'a [u64],
}

impl Context<'_> {
    /// The value of the `position`-th declared name; 0 past the end.
    pub fn get(&self, position: usize) -> u64 {
        self.values.get(position).copied().unwrap_or(0)
    }
}

/// Rows by names, column by column.
///
/// Columns stand `stride` apart, at least as far as there are rows, so that rows come and go without moving every column. Owners that
/// keep a matrix in step with their state use [`Self::set`], [`Self::push_row`] and [`Self::swap_remove_row`]; a seat that fills
/// one for a call uses [`Self::reset`]. Room is kept; nothing allocates once the largest window has been seen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Matrix {
    /// Declared names: columns.
    names: usize,
    /// Candidates.
    rows: usize,
    /// Distance between two columns in `cells`, at least `rows`.
    stride: usize,
    /// `names * stride` values; those of a column past `rows` mean nothing.
    cells: Vec<u64>,
}

impl Matrix {
    /// No rows, `names` columns.
    pub fn new(names: usize) -> Self {
        Self { names, ..Self::default() }
    }

    /// No rows, `names` columns, room for `rows`.
    pub fn with_capacity(names: usize, rows: usize) -> Self {
        let mut matrix = Self::new(names);
        matrix.widen(rows);
        matrix
    }

    /// Of values as they cross the wall: column by column, without gaps. Values that do not fill a column are dropped.
    pub fn from_packed(rows: usize, mut cells: Vec<u64>) -> Self {
        let names = cells.len().checked_div(rows).unwrap_or(0);
        cells.truncate(names * rows);
        Self { names, rows, stride: rows, cells }
    }

    /// Number of candidates.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn names(&self) -> usize {
        self.names
    }

    /// Makes it `rows` by `names`, all zero, packed. Keeps the room.
    pub fn reset(&mut self, names: usize, rows: usize) {
        self.names = names;
        self.rows = rows;
        self.stride = rows;
        self.cells.clear();
        self.cells.resize(names * rows, 0);
    }

    /// One column; empty past the end.
    pub fn column(&self, name: usize) -> &[u64] {
        if name >= self.names {
            return &[];
        }
        let start = name * self.stride;
        &self.cells[start..start + self.rows]
    }

    /// One column, to write.
    pub fn column_mut(&mut self, name: usize) -> &mut [u64] {
        if name >= self.names {
            return &mut [];
        }
        let start = name * self.stride;
        &mut self.cells[start..start + self.rows]
    }

    /// One value; 0 outside.
    pub fn get(&self, row: usize, name: usize) -> u64 {
        self.column(name).get(row).copied().unwrap_or(0)
    }

    /// Writes one value. Outside it writes nothing.
    pub fn set(&mut self, row: usize, name: usize, value: u64) {
        if let Some(cell) = self.column_mut(name).get_mut(row) {
            *cell = value;
        }
    }

    /// Appends a row; missing values are 0. Returns its index.
    pub fn push_row(&mut self, values: &[u64]) -> usize {
        if self.rows == self.stride {
            self.widen((self.stride * 2).max(8));
        }
        let row = self.rows;
        self.rows += 1;
        for name in 0..self.names {
            self.set(row, name, values.get(name).copied().unwrap_or(0));
        }
        row
    }

    /// Removes `row`; the last one takes its index. Outside it does nothing.
    pub fn swap_remove_row(&mut self, row: usize) {
        let Some(last) = self.rows.checked_sub(1).filter(|last| row <= *last) else { return };
        for name in 0..self.names {
            let column = self.column_mut(name);
            column[row] = column[last];
        }
        self.rows = last;
    }

    /// Removes every row, keeps names and room.
    pub fn clear_rows(&mut self) {
        self.rows = 0;
    }

    /// Appends `rows * names` values, column by column without gaps: the form that crosses the wall.
    pub fn pack_into(&self, out: &mut Vec<u64>) {
        for name in 0..self.names {
            out.extend_from_slice(self.column(name));
        }
    }

    /// The packed cells, when no column has room behind it.
    pub fn packed(&self) -> Option<&[u64]> {
        (self.stride == self.rows).then_some(&self.cells[..])
    }

    /// All cells of one that was just [`Self::reset`], to write: column by column, without gaps.
    pub(crate) fn packed_mut(&mut self) -> &mut [u64] {
        debug_assert_eq!(self.stride, self.rows, "a reset leaves no gaps");
        &mut self.cells
    }

    /// All cells and the distance between two columns. Those of a column past [`Self::rows`] mean nothing.
    pub fn strided(&self) -> (&[u64], usize) {
        (&self.cells, self.stride)
    }

    fn widen(&mut self, stride: usize) {
        if stride <= self.stride {
            return;
        }
        self.cells.resize(self.names * stride, 0);
        for name in (1..self.names).rev() {
            let from = name * self.stride;
            self.cells.copy_within(from..from + self.rows, name * stride);
        }
        self.stride = stride;
    }
}
