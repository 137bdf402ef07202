/** When each message begins and ends: by alpha, beta and gamma, or as measured or simulated. */
import type { TimesData } from "./data";
import type { Film } from "./film";

export interface Costs {
  /** Seconds a message. */
  alpha: number;
  /** Seconds a byte on its way, and a byte that is reduced. */
  beta: number;
  gamma: number;
  nbytes: number;
}

export interface Trouble {
  /** A rank that takes `slowness` times as long for everything; -1 for none. */
  slow: number;
  /** A rank that has ended before a step; -1 for none. */
  dead: number;
  deadStep: number;
}

export const SLOWNESS = 4;

/** Times in seconds; Infinity where nothing happens any more. */
export interface Timing {
  /** Of each step and message, in the order of the film. */
  begin: number[][];
  end: number[][];
  /** Of each step and rank: when the rank has ended the step. */
  ends: number[][];
  total: number;
}

/**
 * Every rank posts what it has in a step, then waits for it. A message takes
 * alpha + beta * max(bytes that its source sends, bytes that its target receives) in this step;
 * the ranks share nothing else. The simulator's `crossbar` gives the same times.
 */
export function modelled(film: Film, costs: Costs, trouble: Trouble): Timing {
  const { worldSize, chunksOfData, steps } = film.scene;
  const nbytes = costs.nbytes / chunksOfData;
  const pace = (rank: number): number => (rank === trouble.slow ? SLOWNESS : 1);
  const isDead = (rank: number, step: number): boolean =>
    rank === trouble.dead && step >= trouble.deadStep;
  let now = new Array<number>(worldSize).fill(0);
  const timing: Timing = { begin: [], end: [], ends: [], total: 0 };
  film.steps.forEach((messages, step) => {
    const sent = new Array<number>(worldSize).fill(0);
    const received = new Array<number>(worldSize).fill(0);
    const reduced = new Array<number>(worldSize).fill(0);
    for (const message of messages) {
      sent[message.source]! += message.numChunks;
      received[message.target]! += message.numChunks;
      if (message.isReduced) reduced[message.target]! += message.numChunks;
    }
    for (const [rank, chunks] of steps[step]!.local) reduced[rank]! += chunks;
    const next = [...now];
    const begins: number[] = [];
    const arrivals: number[] = [];
    for (const { source, target } of messages) {
      // A message to or from a rank that has ended is never taken, and its other end waits for ever.
      const begin = isDead(source, step) || isDead(target, step) ? Infinity : now[source]!;
      const bytes = nbytes * Math.max(sent[source]!, received[target]!);
      const arrival = begin + (costs.alpha + costs.beta * bytes) * pace(source);
      begins.push(begin);
      arrivals.push(arrival);
      next[source] = Math.max(next[source]!, arrival);
      next[target] = Math.max(next[target]!, arrival);
    }
    timing.begin.push(begins);
    timing.end.push(arrivals);
    for (let rank = 0; rank < worldSize; rank++) {
      next[rank]! += costs.gamma * nbytes * reduced[rank]! * pace(rank);
      if (isDead(rank, step)) next[rank] = Infinity;
    }
    timing.ends.push(next);
    now = next;
  });
  timing.total = [timing.ends, timing.end].flat(2).reduce((most, end) => (Number.isFinite(end) ? Math.max(most, end) : most), 0);
  return timing;
}

/** The times of a trace, for the messages of a film; segments of a message count as one. */
export function recorded(film: Film, times: TimesData): Timing {
  const byPair = new Map<string, [number, number]>();
  for (const [step, source, target, begin, end] of times.messages) {
    const key = `${step} ${source} ${target}`;
    const [earliest, latest] = byPair.get(key) ?? [Infinity, 0];
    byPair.set(key, [Math.min(earliest, begin), Math.max(latest, end)]);
  }
  const timing: Timing = { begin: [], end: [], ends: [], total: times.seconds };
  let now = new Array<number>(film.scene.worldSize).fill(0);
  for (const messages of film.steps) {
    const pairs: [number, number][] = messages.map(
      ({ step, source, target }) => byPair.get(`${step} ${source} ${target}`) ?? [0, 0],
    );
    timing.begin.push(pairs.map(([begin]) => begin * 1e-6));
    timing.end.push(pairs.map(([, end]) => end * 1e-6));
    now = [...now];
    messages.forEach(({ source, target }, index) => {
      const end = timing.end.at(-1)![index]!;
      now[source] = Math.max(now[source]!, timing.begin.at(-1)![index]!);
      now[target] = Math.max(now[target]!, end);
    });
    timing.ends.push(now);
  }
  return timing;
}
