//! The few largest of many logits.

/// The `count` largest logits with their ids, largest first, of equal ones the lower id first.
pub(super) fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return top;
    }
    let mut least = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        // Ids ascend, so an equal logit that comes later never displaces one.
        if top.len() < count || logit > least {
            let at = top.partition_point(|&(_, other)| other >= logit);
            top.insert(at, (id as u32, logit));
            top.truncate(count);
            least = top[top.len() - 1].1;
        }
    }
    top
}
