/** The data of a page; ringcoll/lab/pictures/player.py writes them. */

/** Source, target, chunks as runs ("0-3,7"), and 1 if the target adds the message to its own data. */
export type MessageData = [number, number, string, 0 | 1];
/** Rank, chunk, and the number of a set of ranks: from now on, the chunk is made of these contributions. */
export type Change = [number, number, number];

export interface StepData {
  messages: MessageData[];
  /** Chunks that a rank reduces without a message. */
  local: [number, number][];
  changes: Change[];
}

export interface SceneData {
  name: string;
  collective: string;
  worldSize: number;
  numChunks: number;
  /** Chunks in the whole data, whose size the slider sets. */
  chunksOfData: number;
  /** Contributions of a complete chunk. */
  complete: number;
  layout: string;
  places: [number, number][];
  /** Sets of ranks, as runs. */
  sets: string[];
  start: Change[];
  steps: StepData[];
  /** The order of summation of each complete chunk. */
  orders: Record<string, string>;
  proof: string;
  failure: { words: string; rank: number | null; step: number | null; chunk: number | null } | null;
}

/** A fault on purpose: what it changes of the first scene. */
export type FaultData = { title: string } & Pick<
  SceneData,
  "sets" | "start" | "steps" | "failure" | "proof" | "orders"
>;

export interface CurveData {
  name: string;
  rounds: number;
  traffic: number;
  reduced: number;
}

export interface TimesData {
  title: string;
  seconds: number;
  /** Step, source, target, begin and end in microseconds. */
  messages: [number, number, number, number, number][];
}

/** A simulated network; its nodes are the ranks, and then the switches. */
export interface NetworkData {
  name: string;
  switches: string[];
  places: [number, number][];
  /** The links that have carried anything, the fullest first, with the share of what they could have carried. */
  links: { name: string; source: number; target: number; nbytes: number; share: number | null }[];
  /** By "source target" of a message, the links on its way. */
  routes: Record<string, number[]>;
}

export interface PageData {
  scenes: SceneData[];
  faults: FaultData[];
  curves: CurveData[];
  times: TimesData | null;
  network: NetworkData | null;
  settings: Record<string, string>;
}
