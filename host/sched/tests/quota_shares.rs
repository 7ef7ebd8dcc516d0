//! Several gateways and one tenant: what they let in together is never more than its quota, and all of it while every slot is held.

use std::sync::Arc;

use penstock_base::{
    ClassRank, Duration, FlowId, GatewayEpoch, Generation, Instant, Manifest, Outcome, Priority, Refusal, RequestId,
    SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayEffect, GatewayInput};
use penstock_sched::quota::{QuotaShare, QuotaSlots, SLOTS};

const GATEWAYS: u16 = 3;
const WINDOW_TOKENS: u64 = 5_003;
const REQUESTS: u32 = 41;

fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

fn request(epoch: u16, number: u64, tenant: u64, (input_tokens, max_output_tokens): (u32, u32)) -> Arc<Manifest> {
    Arc::new(Manifest {
        request: RequestId::new(GatewayEpoch(epoch), number).expect("a small number"),
        tenant: TenantId(tenant),
        flow: FlowId(1),
        session: SessionId(0),
        trust: TrustGroup(0),
        class: ClassRank::clamped(3),
        priority: Priority(0),
        sequences: 1,
        input_tokens,
        max_output_tokens,
        arrived: Instant::ZERO,
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::default(),
        prefix_key: 0,
        keys: Box::new([]),
        retention: 50,
        retry: false,
        terms: TenantTerms { requests_max: REQUESTS, window_tokens_max: WINDOW_TOKENS, ..TenantTerms::default() },
    })
}

#[test]
fn together_they_let_in_what_the_quota_says() {
    for seed in 0..40 {
        let mut draw = draws(seed);
        let now = Instant(1_000_000_000);
        let tenant = 1 + draw(1_000);
        let mut slots = [QuotaSlots::NONE; GATEWAYS as usize];
        (0..SLOTS).for_each(|slot| slots[draw(GATEWAYS.into()) as usize].insert(slot));
        let mut gateways: Vec<_> = (1..=GATEWAYS)
            .map(|epoch| {
                let config = GatewayConfig {
                    epoch: GatewayEpoch(epoch),
                    gateways: GATEWAYS.into(),
                    tenants_max: 8,
                    flows_max: 8,
                    directory_keys_max: 8,
                    check_every_step: true,
                    ..GatewayConfig::default()
                };
                (Gateway::new(config, now), NativePolicies::new(Generation(1), 64))
            })
            .collect();
        // Small requests, so that the last tokens and the last request find somebody who has room.
        let large = seed % 2 == 0;
        let mut refused_by_all = 0;
        for number in 1..4_000 {
            let size = if large { (1 + draw(300) as u32, 1 + draw(300) as u32) } else { (1, 1) };
            let mut refused = 0;
            let first = draw(GATEWAYS.into());
            for turn in 0..u64::from(GATEWAYS) {
                let at = ((first + turn) % u64::from(GATEWAYS)) as usize;
                let (gateway, policies) = &mut gateways[at];
                let mut effects = Vec::new();
                let until = now + Duration::from_s(60);
                let share = QuotaShare { slots: slots[at], members: GATEWAYS.into(), as_of: now, until };
                gateway.step(now, GatewayInput::QuotaShare(share), policies, &mut effects);
                let manifest = request(at as u16 + 1, number, tenant, size);
                gateway.step(now, GatewayInput::Arrive(manifest), policies, &mut effects);
                let ended = effects.iter().find_map(|effect| match effect {
                    GatewayEffect::Ended { outcome, .. } => Some(*outcome),
                    _ => None,
                });
                match ended {
                    None => break,
                    Some(Outcome::Refused(Refusal::Quota)) => refused += 1,
                    Some(other) => panic!("seed {seed}: {other:?}"),
                }
            }
            refused_by_all += u32::from(refused == GATEWAYS);
            let used = gateways.iter().filter_map(|(gateway, _)| gateway.tenant_used_tokens(TenantId(tenant)));
            assert!(used.sum::<u64>() <= WINDOW_TOKENS, "seed {seed}");
            let live: usize = gateways.iter().map(|(gateway, _)| gateway.live_requests()).sum();
            assert!(live <= REQUESTS as usize, "seed {seed}");
            if refused_by_all > 20 {
                break;
            }
        }
        assert!(refused_by_all > 0, "seed {seed}: the quota was reached");
        let live: usize = gateways.iter().map(|(gateway, _)| gateway.live_requests()).sum();
        if !large {
            assert_eq!(live, REQUESTS as usize, "seed {seed}: all of it was to be had");
        }
    }
}
